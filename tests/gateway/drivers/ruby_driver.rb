# What Ruby's driver does with a deployment, as facts to compare: JSON on standard output.
#
#   ruby ruby_driver.rb URI NAME
#
# NAME is part of the database's name and the application's, so that fail points affect this program alone.
# Debian's version (2.5) knows sessions, but no transactions yet.
require "json"
require "mongo"

# That version uses functions that this newer Ruby no longer has.
def URI.decode(text) = URI.decode_www_form_component(text)
def URI.encode(text) = URI.encode_www_form_component(text)

URI_GIVEN, NAME = ARGV
Mongo::Logger.logger.level = Logger::FATAL
FACTS = {}
STARTED = Hash.new(0)

class Counter
  def started(event) = STARTED[event.command_name.to_s] += 1
  def succeeded(event) = nil
  def failed(event) = nil
end

CLIENT = Mongo::Client.new(URI_GIVEN, database: NAME, app_name: NAME, heartbeat_frequency: 1, retry_writes: true,
                           write: { w: "majority" })
CLIENT.subscribe(Mongo::Monitoring::COMMAND, Counter.new)
DB = CLIENT.database

def code_of
  yield
  0
rescue Mongo::Error => error
  error.message[/\((\d+)\)/, 1].to_i
end

def text_of
  yield
  "no error"
rescue Mongo::Error => error
  error.message
end

def crud
  c = CLIENT[:crud]
  c.insert_many((0...300).map { |number| { _id: number, x: number % 7 } })
  FACTS[:found] = c.find({}, batch_size: 50).sort(_id: 1).to_a.size
  FACTS[:updated] = c.update_many({ x: 3 }, { "$inc" => { x: 100 } }).modified_count
  FACTS[:replaced] = c.find_one_and_replace({ _id: 1 }, { y: 1 }, return_document: :after)
  FACTS[:deleted] = c.delete_many({ x: { "$gt" => 100 } }).deleted_count
  bulk = c.bulk_write([
    { insert_one: { _id: 1000 } },
    { update_one: { filter: { _id: 1000 }, update: { "$set" => { a: 1 } } } },
    { replace_one: { filter: { _id: 1001 }, replacement: { b: 1 }, upsert: true } },
    { delete_one: { filter: { _id: 1000 } } },
  ])
  FACTS[:bulk] = [bulk.inserted_count, bulk.modified_count, bulk.upserted_count, bulk.deleted_count]
  FACTS[:duplicate] = text_of { c.insert_one(_id: 1) }
  FACTS[:count] = c.count
  FACTS[:groups] = c.aggregate([{ "$group" => { _id: "$x", n: { "$sum" => 1 } } }, { "$sort" => { _id: 1 } }]).to_a
  FACTS[:distinct] = c.distinct(:x).compact.sort
end

def sessions
  session = CLIENT.start_session
  CLIENT[:crud].insert_one({ _id: "in a session" }, session: session)
  FACTS[:session] = CLIENT[:crud].find({ _id: "in a session" }, session: session).first
  session.end_session
end

def gridfs
  bucket = DB.fs
  contents = "tailrace" * 90_000
  id = bucket.upload_from_stream("file", StringIO.new(contents))
  back = StringIO.new
  bucket.download_to_stream(id, back)
  FACTS[:gridfs] = back.string == contents
end

def indexes
  view = CLIENT[:crud].indexes
  view.create_one({ x: 1, y: -1 })
  FACTS[:indexes] = view.map { |index| index["name"] }.sort
  view.drop_one("x_1_y_-1")
end

def failing(command, **failure)
  admin = CLIENT.use(:admin).database
  data = { failCommands: [command], appName: NAME, **failure }
  admin.command(configureFailPoint: "failCommand", mode: { times: 1 }, data: data)
  yield
ensure
  admin.command(configureFailPoint: "failCommand", mode: "off")
end

def retries
  c = CLIENT[:retries]
  failing("insert", closeConnection: true) { FACTS[:retried_write] = c.insert_one(_id: 1).n }
  failing("find", closeConnection: true) { FACTS[:retried_read] = c.find(_id: 1).first }
  failing("insert", errorCode: 2) { FACTS[:not_retried] = text_of { c.insert_one(_id: 2) } }
end

# The driver's `to_enum` waits for an event for ever, so there is always one.
def take(stream, count) = stream.to_enum.first(count)

def keys(events) = events.map { |event| event["documentKey"]["_id"] }

def watching
  DB.command(create: "watched")
  c = CLIENT[:watched]
  stream = c.watch([], full_document: "updateLookup", max_await_time_ms: 200)
  few = c.watch([{ "$match" => { operationType: { "$ne" => "update" } } }], batch_size: 1, max_await_time_ms: 200)
  c.insert_one(_id: 1, a: 1)
  c.update_one({ _id: 1 }, { "$set" => { a: 2 } })
  c.replace_one({ _id: 1 }, { b: 1 })
  events = take(stream, 3)
  c.delete_one(_id: 1)
  events += take(stream, 1)
  FACTS[:watched] = events.map { |event| [event["operationType"], event["documentKey"], event["updateDescription"]] }
  FACTS[:looked_up] = events[1]["fullDocument"]
  FACTS[:few] = take(few, 3).map { |event| event["operationType"] }
  stream.close
  few.close
  FACTS[:closed] = stream.closed?
end

def resuming
  DB.command(create: "resumed")
  c = CLIENT[:resumed]
  first = c.watch([], max_await_time_ms: 200)
  c.insert_many((1..4).map { |number| { _id: number } })
  event = take(first, 1)[0]
  first.close
  again = c.watch([], resume_after: event["_id"], max_await_time_ms: 200)
  FACTS[:resume_after] = keys(take(again, 3))
  again.close
  FACTS[:unknown_stage] = text_of { c.watch([{ "$nothing" => 1 }]) }
  FACTS[:no_token] = text_of { c.watch([], resume_after: { _data: "zz" }) }
  stream = c.watch([], max_await_time_ms: 200)
  c.insert_one(_id: 5)
  FACTS[:before_the_cut] = keys(take(stream, 1))
  failing("getMore", closeConnection: true) do
    c.insert_one(_id: 6)
    FACTS[:cut] = keys(take(stream, 1))
  end
  stream.close
end

def invalidating
  DB.command(create: "invalidated")
  c = CLIENT[:invalidated]
  stream = c.watch([], max_await_time_ms: 200)
  c.insert_one(_id: 1)
  c.drop
  events = take(stream, 3)
  FACTS[:invalidated] = events.map { |event| event["operationType"] }
  FACTS[:resumed_after] = code_of { c.watch([], resume_after: events[2]["_id"]) }
end

begin
  DB.drop
  %i[crud sessions gridfs indexes retries watching resuming invalidating].each do |part|
    warn part # so that whoever waits in vain sees where it is
    send(part)
  end
  FACTS[:monitored] = %w[insert find getMore aggregate createIndexes].map { |command| STARTED[command].positive? }
  DB.drop
  CLIENT.close
rescue StandardError => error
  FACTS[:error] = "#{error.class}: #{error.message} #{error.backtrace.first(6)}"
end
puts JSON.pretty_generate(FACTS)
exit FACTS.key?(:error) ? 1 : 0
