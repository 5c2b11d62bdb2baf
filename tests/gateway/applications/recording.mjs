// What change streams give to somebody else's application, read from the server itself and through the gateway.
import { createRequire } from "node:module";
import { join } from "node:path";

export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
export const requireFrom = (folder) => createRequire(join(folder, "x.js"));

// What the driver hands to the application, in extended JSON, from now on: `given.direct` and `given.gateway`, a list for
// each stream in the order in which they were opened. `mongodb` is the application's own copy of the driver.
export function record(mongodb, gateway) {
  const given = { direct: [], gateway: [] };
  const streams = new Map();
  const address = new URL(gateway).host;
  const process = mongodb.ChangeStream.prototype._processChange;
  const listOf = (stream) => {
    if (!streams.has(stream)) {
      const client = stream.parent.client ?? stream.parent;
      const side = client.options.hosts.some((host) => host.toString() === address) ? "gateway" : "direct";
      streams.set(stream, []);
      given[side].push(streams.get(stream));
    }
    return streams.get(stream);
  };
  mongodb.ChangeStream.prototype._processChange = function (change) {
    if (change) listOf(this).push(mongodb.BSON.EJSON.stringify(change, { relaxed: false }));
    return process.call(this, change);
  };
  for (const owner of [mongodb.Collection, mongodb.Db, mongodb.MongoClient]) {
    const watch = owner.prototype.watch;
    owner.prototype.watch = function (...options) {
      const stream = watch.apply(this, options);
      listOf(stream);
      return stream;
    };
  }
  Object.defineProperty(given, "streams", { value: () => [...streams.keys()] });
  return given;
}

export const count = (lists) => lists.reduce((sum, list) => sum + list.length, 0);

export async function until(holds, what, limitMs = 120_000) {
  for (const end = Date.now() + limitMs; !(await holds()); await sleep(20)) {
    if (Date.now() > end) throw new Error(`still waiting for ${what}`);
  }
}

// One step of the workload, and what both sides are given for it. An event that one side lacks shows at the end.
export async function step(given, action) {
  const before = count(given.direct);
  const result = await action();
  await until(() => count(given.direct) > before, `an event of ${action}`);
  for (let tries = 0; tries < 500 && count(given.gateway) < count(given.direct); tries++) await sleep(20);
  return result;
}

// Wait until nothing more comes on either side.
export async function settle(given) {
  for (let last = -1, same = 0; same < 20; same++) {
    const now = count(given.direct) + count(given.gateway);
    if (now !== last || count(given.gateway) !== count(given.direct)) {
      same = now === last ? same : 0;
      last = now;
    }
    await sleep(100);
  }
}

// Wait until that many streams are open at the server, so that they have whatever is written from now on.
export async function opened(given, number) {
  const open = () => given.streams().filter(({ cursor }) => cursor.id !== undefined && cursor.id !== null).length;
  await until(() => open() >= number, `${number} streams to be opened`);
}

export function finish(facts) {
  process.stdout.write(JSON.stringify(facts), () => process.exit(0));
}
