// What mongosh does with a deployment, as facts to compare: JSON on standard output.
//
//   NAME=... mongosh --quiet --norc URI mongosh_driver.js
const name = process.env.NAME;
const facts = {};
const here = db.getSiblingDB(name);
here.dropDatabase();

facts.hello = [typeof db.hello().setName, db.hello().isWritablePrimary];
here.crud.insertMany(Array.from({ length: 300 }, (_, number) => ({ _id: number, x: number % 7 })));
facts.found = here.crud.find().batchSize(50).toArray().length;
facts.updated = here.crud.updateMany({ x: 3 }, { $inc: { x: 100 } }).modifiedCount;
facts.deleted = here.crud.deleteMany({ x: { $gt: 100 } }).deletedCount;
facts.index = here.crud.createIndex({ x: 1 });
facts.indexes = here.crud.getIndexes().map((one) => one.name);
facts.explained = here.crud.find({ x: 1 }).explain().ok;
facts.stats = here.stats().ok;
facts.admin = [db.adminCommand({ ping: 1 }).ok, db.adminCommand({ buildInfo: 1 }).version, rs.status().ok];
facts.current = db.adminCommand({ currentOp: 1 }).ok;

here.createCollection("transactions");
const session = db.getMongo().startSession();
session.startTransaction();
session.getDatabase(name).transactions.insertOne({ _id: 1 });
session.commitTransaction();
session.endSession();
facts.committed = here.transactions.countDocuments();

function take(stream, count) {
  const events = [];
  for (let look = 0; look < 600 && events.length < count; look++) {
    const event = stream.tryNext();
    if (event) events.push(event);
  }
  return events;
}

here.createCollection("watched");
const stream = here.watched.watch([], { fullDocument: "updateLookup" });
stream.tryNext();
here.watched.insertOne({ _id: 1 });
here.watched.updateOne({ _id: 1 }, { $set: { a: 1 } });
const events = take(stream, 2);
facts.watched = events.map((event) => [event.operationType, event.fullDocument]);
stream.close();
const resumed = here.watched.watch([], { resumeAfter: events[0]._id });
facts.resumed = take(resumed, 1).map((event) => event.operationType);
here.watched.drop();
facts.invalidated = take(resumed, 2).map((event) => event.operationType);
facts.database = take(here.watch([], { startAtOperationTime: events[0].clusterTime }), 2).map((event) => event.operationType);
facts.cluster = take(db.getMongo().watch([{ $match: { "ns.db": name } }], { startAtOperationTime: events[0].clusterTime }), 2)
  .map((event) => event.operationType);
try {
  here.watched.watch([{ $nothing: 1 }]).tryNext();
} catch (error) {
  facts.refused = [error.code, error.codeName];
}
here.dropDatabase();
print(JSON.stringify(facts, null, 1));
