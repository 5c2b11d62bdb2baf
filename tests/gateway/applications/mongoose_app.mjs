// mongoose: models and connections that watch, hydrated documents, bulk writes, transactions.
//   node mongoose_app.mjs DIRECT GATEWAY NAME PACKAGES
import { finish, opened, record, requireFrom, settle, step } from "./recording.mjs";

const [direct, gateway, name, packages] = process.argv.slice(2);
const require = requireFrom(packages);
const mongoose = require("mongoose");
const given = record(mongoose.mongo, gateway);

const sides = [];
for (const uri of [direct, gateway]) {
  const connection = await mongoose.createConnection(uri, { dbName: name }).asPromise();
  const schema = new mongoose.Schema(
    {
      customer: { type: String, index: true },
      lines: [{ sku: String, count: Number }],
      total: mongoose.Schema.Types.Decimal128,
      notes: { type: Map, of: String },
      at: Date,
      picture: Buffer,
    },
    { timestamps: true, collection: "orders" },
  );
  sides.push({ connection, Order: connection.model("Order", schema), hydrated: [] });
}
const [first] = sides;
await first.connection.dropDatabase();
await first.Order.createCollection();
await first.Order.init();
for (const side of sides) {
  const whole = side.Order.watch([], { fullDocument: "updateLookup", hydrate: true });
  whole.on("change", (change) => side.hydrated.push(change.fullDocument?.summary?.() ?? change.fullDocument?.customer ?? null));
  const some = side.Order.watch([{ $match: { operationType: { $in: ["update", "delete"] } } }, { $project: { ns: 0 } }]);
  some.on("change", () => {});
  const all = side.connection.watch([{ $set: { extra: { $concat: ["$operationType", "!"] } } }]);
  all.on("change", () => {});
}
await opened(given, 6);

const kept = [];
for (let number = 0; number < 12; number++) {
  const { Order } = sides[number % 2]; // written through both
  kept.push(
    await step(given, () =>
      Order.create({
        customer: `c${number}`,
        lines: [{ sku: "a", count: number }],
        total: `${number}.50`,
        notes: { first: "x" },
        at: new Date(1_700_000_000_000 + number),
        picture: Buffer.from([number, 255]),
      }),
    ),
  );
}
for (const document of kept.slice(0, 5)) {
  document.lines.push({ sku: "b", count: 7 });
  document.notes.set("second", "y");
  document.lines[0].count += 1;
  await step(given, () => document.save());
}
await step(given, () => first.Order.findOneAndUpdate({ customer: "c5" }, { $unset: { at: 1 }, $pull: { lines: { sku: "a" } } }));
await step(given, () => sides[1].Order.replaceOne({ customer: "c6" }, { customer: "c6", total: "1" }));
await step(given, () => first.Order.updateMany({ customer: { $in: ["c7", "c8"] } }, { $set: { customer: "moved" } }));
await step(given, () =>
  sides[1].Order.bulkWrite([
    { insertOne: { document: { customer: "bulk" } } },
    { updateOne: { filter: { customer: "c9" }, update: { $set: { "lines.0.count": 99 } } } },
    { deleteOne: { filter: { customer: "c10" } } },
  ]),
);
await step(given, () =>
  first.connection.transaction(async (session) => {
    await first.Order.create([{ customer: "t1" }, { customer: "t2" }], { session, ordered: true });
    await first.Order.deleteOne({ customer: "c11" }, { session });
  }),
);
await step(given, () => first.connection.collection("others").insertOne({ plain: true }));
await settle(given); // so that no document is still to be looked up when its collection is dropped
await step(given, () => first.Order.collection.drop());
await settle(given);
finish({ given, seen: sides.map((side) => side.hydrated) });
