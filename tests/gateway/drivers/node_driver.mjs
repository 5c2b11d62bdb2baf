// What Node's driver does with a deployment, as facts to compare: JSON on standard output.
//
//   node node_driver.mjs URI NAME PACKAGES
//
// NAME is part of the database's name and the application's, so that fail points affect this program alone.
// PACKAGES is the directory that holds node_modules.
import { createRequire } from "node:module";
import { join } from "node:path";

const [uri, name, packages] = process.argv.slice(2);
const { MongoClient, GridFSBucket, Long } = createRequire(join(packages, "x.js"))("mongodb");

const facts = {};
const quick = { maxAwaitTimeMS: 200 }; // otherwise a getMore on a quiet stream waits a second

const started = [];
const client = new MongoClient(uri, { appName: name, monitorCommands: true, heartbeatFrequencyMS: 1000 });
client.on("commandStarted", (event) => started.push(event.commandName));
let heartbeats = 0;
client.on("serverHeartbeatSucceeded", () => heartbeats++);

async function main() {
  const heard = new Promise((resolve) => client.on("topologyDescriptionChanged", ({ newDescription }) => {
    if (newDescription.type.startsWith("ReplicaSetWithPrimary")) resolve(newDescription.type);
  }));
  await client.connect();
  const db = client.db(name);
  await db.dropDatabase();
  facts.topology = uri.includes("replicaSet") ? await heard : "any";
  for (const part of [crud, transactions, gridfs, indexes, retries, watching, resuming, invalidating, large]) {
    console.error(part.name); // so that whoever waits in vain sees where it is
    await part(db);
  }
  facts.heartbeats = heartbeats > 0;
  facts.monitored = ["insert", "find", "getMore", "aggregate", "commitTransaction", "createIndexes"].map(
    (wanted) => started.includes(wanted));
  await db.dropDatabase();
}

async function crud(db) {
  const c = db.collection("crud");
  await c.insertMany(Array.from({ length: 300 }, (_, number) => ({ _id: number, x: number % 7, long: Long.fromNumber(number) })));
  facts.found = (await c.find({}, { batchSize: 50 }).sort({ _id: 1 }).toArray()).length;
  facts.updated = (await c.updateMany({ x: 3 }, { $inc: { x: 100 } })).modifiedCount;
  facts.replaced = (await c.findOneAndReplace({ _id: 1 }, { y: 1 }, { returnDocument: "after" }));
  facts.deleted = (await c.deleteMany({ x: { $gt: 100 } })).deletedCount;
  const bulk = await c.bulkWrite([
    { insertOne: { document: { _id: 1000 } } },
    { updateOne: { filter: { _id: 1000 }, update: { $set: { a: 1 } } } },
    { replaceOne: { filter: { _id: 1001 }, replacement: { b: 1 }, upsert: true } },
    { deleteOne: { filter: { _id: 1000 } } },
  ]);
  facts.bulk = [bulk.insertedCount, bulk.modifiedCount, bulk.upsertedCount, bulk.deletedCount];
  facts.groups = await c.aggregate([{ $group: { _id: "$x", n: { $sum: 1 } } }, { $sort: { _id: 1 } }]).toArray();
  facts.duplicate = await c.insertOne({ _id: 1 }).catch((error) => error.code);
  const early = c.find({}, { ...quick, batchSize: 2 });
  await early.next();
  await early.close();
  await c.insertMany(Array.from({ length: 1000 }, () => ({ text: "x".repeat(100) })), { writeConcern: { w: 0 } });
  facts.unacknowledged = true;
  facts.collections = (await db.listCollections().toArray()).map((one) => one.name).sort();
}

async function transactions(db) {
  const c = await db.createCollection("transactions");
  await client.withSession(async (session) => {
    await session.withTransaction(async () => {
      await c.insertOne({ _id: 1 }, { session });
      await c.insertOne({ _id: 2 }, { session });
    });
  });
  await client.withSession(async (session) => {
    session.startTransaction();
    await c.insertOne({ _id: 3 }, { session });
    facts.outside = await c.countDocuments();
    await session.abortTransaction();
  });
  facts.committed = await c.countDocuments();
}

async function gridfs(db) {
  const bucket = new GridFSBucket(db);
  const contents = Buffer.alloc(700_000, "tailrace");
  const upload = bucket.openUploadStream("file");
  await new Promise((resolve, reject) => upload.on("finish", resolve).on("error", reject).end(contents));
  const chunks = [];
  for await (const chunk of bucket.openDownloadStreamByName("file")) chunks.push(chunk);
  facts.gridfs = Buffer.concat(chunks).equals(contents);
}

async function indexes(db) {
  const c = db.collection("crud");
  facts.index = await c.createIndex({ x: 1, y: -1 }, { unique: false });
  facts.indexes = (await c.listIndexes().toArray()).map((one) => one.name).sort();
  await c.dropIndex(facts.index);
}

async function failing(commands, code, work, more = {}) {
  const admin = client.db("admin");
  await admin.command({ configureFailPoint: "failCommand", mode: { times: 1 },
    data: { failCommands: commands, errorCode: code, appName: name, ...more } });
  try {
    return await work();
  } finally {
    await admin.command({ configureFailPoint: "failCommand", mode: "off" });
  }
}

async function retries(db) {
  const c = db.collection("retries");
  facts.retriedWrite = await failing(["insert"], 91, async () => (await c.insertOne({ _id: 1 })).insertedId, { errorLabels: ["RetryableWriteError"] });
  facts.retriedRead = await failing(["find"], 91, async () => (await c.findOne({ _id: 1 }))._id);
  facts.notRetried = await failing(["insert"], 2, () => c.insertOne({ _id: 2 }).catch((error) => error.code));
}

const kinds = (events) => events.map((event) => event.operationType);

async function take(stream, count) {
  const events = [];
  while (events.length < count) events.push(await stream.next());
  return events;
}

async function watching(db) {
  const hasImages = (await db.command({ buildInfo: 1 })).versionArray[0] >= 6;
  const c = await db.createCollection("watched", hasImages ? { changeStreamPreAndPostImages: { enabled: true } } : {});
  const before = hasImages ? { fullDocumentBeforeChange: "whenAvailable" } : {};
  const streams = [
    c.watch([], { ...quick, fullDocument: "updateLookup", ...before }),
    db.watch([{ $match: { operationType: { $ne: "update" } } }], { ...quick, batchSize: 2 }),
    client.watch([{ $match: { "ns.db": name } }, { $project: { operationType: 1, ns: 1 } }], quick),
  ];
  for (const stream of streams) await stream.tryNext();
  await c.insertOne({ _id: 1, a: 1 });
  await c.updateOne({ _id: 1 }, { $set: { a: 2 } });
  await c.replaceOne({ _id: 1 }, { b: 1 });
  await c.deleteOne({ _id: 1 });
  const events = await take(streams[0], 4);
  facts.watched = events.map((event) => [event.operationType, event.documentKey._id, event.operationType === "update" || (event.fullDocument ?? null), event.fullDocumentBeforeChange ?? null, event.updateDescription?.updatedFields ?? null]);
  await c.insertOne({ _id: 2 });
  await c.updateOne({ _id: 2 }, { $set: { a: 1 } });
  facts.lookedUp = (await take(streams[0], 2))[1].fullDocument;
  facts.database = kinds(await take(streams[1], 4));
  facts.cluster = kinds(await take(streams[2], 6));
  facts.quiet = [await streams[0].tryNext(), await streams[2].tryNext()];
  const token = JSON.stringify(streams[0].resumeToken);
  await db.collection("elsewhere").insertOne({});
  await streams[0].tryNext();
  facts.moved = JSON.stringify(streams[0].resumeToken) > token;
  const waiting = streams[0].next().then(() => "event", (error) => error.name.replace("MongoChangeStreamError", "closed").replace("MongoAPIError", "closed"));
  for (const stream of streams) await stream.close(); // one of them while its getMore waits
  facts.closed = await waiting;
}

async function resuming(db) {
  const c = await db.createCollection("resumed");
  const first = c.watch([], quick);
  await first.tryNext();
  await c.insertMany([1, 2, 3, 4].map((_id) => ({ _id })));
  const [event] = await take(first, 1);
  await first.close();
  for (const option of ["resumeAfter", "startAfter"]) {
    const stream = c.watch([], { ...quick, [option]: event._id });
    facts[option] = (await take(stream, 3)).map((one) => one.documentKey._id);
    await stream.close();
  }
  const timed = c.watch([], { ...quick, startAtOperationTime: event.clusterTime });
  facts.startAtOperationTime = (await take(timed, 4)).map((one) => one.documentKey._id);
  // An error that drivers resume from, and one that they do not.
  await failing(["getMore"], 10107, async () => {
    const stream = c.watch([], quick);
    await stream.tryNext();
    await c.insertOne({ _id: 5 });
    facts.resumed = (await stream.next()).documentKey._id;
    await stream.close();
  }, { errorLabels: ["ResumableChangeStreamError"] });
  await failing(["getMore"], 10107, async () => {
    const stream = c.watch([], quick);
    await stream.tryNext();
    await c.insertOne({ _id: 6 });
    facts.cut = (await stream.next()).documentKey._id;
    await stream.close();
  }, { closeConnection: true });
  facts.bad = [];
  for (const [pipeline, options] of [
    [[{ $nothing: 1 }], {}], [[{ $out: "x" }], {}], [[], { resumeAfter: { _data: "zz" } }], [[], { fullDocument: "never" }],
    [[], { resumeAfter: event._id, startAfter: event._id }],
  ]) {
    const stream = c.watch(pipeline, { ...quick, ...options });
    facts.bad.push(await stream.tryNext().catch((error) => [error.code, error.codeName, error.message]));
    await stream.close().catch(() => {});
  }
  await timed.close();
}

async function invalidating(db) {
  const c = await db.createCollection("invalidated");
  const stream = c.watch([], quick);
  await stream.tryNext();
  await c.insertOne({ _id: 1 });
  await c.drop();
  const events = await take(stream, 3);
  facts.invalidated = kinds(events);
  facts.afterInvalidate = await stream.next().catch((error) => error.message);
  const again = db.collection("invalidated").watch([], { ...quick, startAfter: events[2]._id });
  await again.tryNext();
  await db.collection("invalidated").insertOne({ _id: 2 });
  facts.startedAfterInvalidate = kinds(await take(again, 1));
  await again.close();
  const refused = db.collection("invalidated").watch([], { ...quick, resumeAfter: events[2]._id });
  facts.resumedAfterInvalidate = await refused.tryNext().catch((error) => error.code);
  await refused.close().catch(() => {});
}

async function large(db) {
  const c = db.collection("large");
  const text = "x".repeat(15_000_000);
  const stream = c.watch([], quick);
  await stream.tryNext();
  await c.insertOne({ _id: 1, text });
  await c.insertMany([2, 3, 4].map((_id) => ({ _id, text })));
  const event = await stream.next();
  facts.large = [event.fullDocument.text.length, (await c.findOne({ _id: 1 })).text.length, await c.countDocuments()];
  await stream.close();
}

try {
  await main();
} catch (error) {
  facts.error = String(error.stack);
  process.exitCode = 1;
}
console.log(JSON.stringify(facts, null, 1));
await client.close();
