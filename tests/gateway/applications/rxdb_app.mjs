// RxDB: a local database on each side that replicates one collection of MongoDB in both directions. Its streams ask for
// pre-images.
//   node rxdb_app.mjs DIRECT GATEWAY NAME PACKAGES
import { finish, record, requireFrom, settle, sleep, step, until } from "./recording.mjs";

const [direct, gateway, name, packages] = process.argv.slice(2);
const require = requireFrom(packages);
const { createRxDatabase } = require("rxdb");
const { getRxStorageMemory } = require("rxdb/plugins/storage-memory");
const { replicateMongoDB } = require("rxdb/plugins/replication-mongodb");
const mongodb = require("mongodb");
const given = record(mongodb, gateway);

const client = await new mongodb.MongoClient(direct).connect();
await client.db(name).dropDatabase();
const orders = await client.db(name).createCollection("orders", { changeStreamPreAndPostImages: { enabled: true } });
await orders.insertMany([1, 2, 3].map((number) => ({ id: `before${number}`, n: number })));

const schema = {
  version: 0,
  primaryKey: "id",
  type: "object",
  properties: { id: { type: "string", maxLength: 50 }, n: { type: "number" }, tags: { type: "array", items: { type: "string" } } },
  required: ["id"],
};
const sides = [];
for (const [number, connection] of [direct, gateway].entries()) {
  const database = await createRxDatabase({ name: `local${number}`, storage: getRxStorageMemory(), multiInstance: false });
  const { orders: collection } = await database.addCollections({ orders: { schema } });
  const errors = [];
  const replication = replicateMongoDB({
    mongodb: { collectionName: "orders", databaseName: name, connection },
    collection,
    replicationIdentifier: `replication${number}`,
    waitForLeadership: false,
    live: true,
    pull: { batchSize: 10 },
    push: { batchSize: 10 },
  });
  replication.error$.subscribe((error) => errors.push(String(error)));
  await replication.awaitInitialReplication();
  sides.push({ collection, replication, errors });
}
await sleep(1000); // the streams are opened beside the first replication

for (let number = 0; number < 8; number++) {
  await step(given, () => orders.insertOne({ id: `server${number}`, n: number, tags: ["a"] }));
  await step(given, () => sides[number % 2].collection.insert({ id: `local${number}`, n: number, tags: ["b"] }));
}
for (let number = 0; number < 4; number++) {
  await step(given, () => orders.updateOne({ id: `server${number}` }, { $set: { n: 100 + number }, $push: { tags: "c" } }));
  const { collection } = sides[number % 2];
  await until(() => collection.findOne(`local${number}`).exec(), "a document to be replicated");
  const document = await collection.findOne(`local${number}`).exec();
  await step(given, () => document.patch({ n: 200 + number }));
}
for (let number = 4; number < 6; number++) {
  const { collection } = sides[number % 2];
  const document = await collection.findOne(`local${number}`).exec();
  await step(given, () => document.remove());
}
await settle(given);
const local = async ({ collection }) =>
  (await collection.find({ sort: [{ id: "asc" }] }).exec()).map((document) => document.toJSON());
await until(async () => {
  for (const { replication } of sides) await replication.awaitInSync();
  return JSON.stringify(await local(sides[0])) === JSON.stringify(await local(sides[1]));
}, "both local databases to be equal");
// The first stream of each side is followed all the time. The others resume from a checkpoint until they find nothing
// more, and how often that happens varies: of their events, those that both sides have had are compared.
const later = (lists) => new Map(lists.slice(1).flat().map((text) => [JSON.parse(text)._id._data, text]));
const both = [later(given.direct), later(given.gateway)];
const common = [...both[0].keys()].filter((token) => both[1].has(token)).sort();
given.direct = [given.direct[0], common.map((token) => both[0].get(token))];
given.gateway = [given.gateway[0], common.map((token) => both[1].get(token))];
finish({ given, seen: await Promise.all(sides.map(local)), errors: sides.flatMap((side) => side.errors) });
