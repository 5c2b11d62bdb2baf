// socket.io's adapter for MongoDB: three servers of one cluster; two listen, on each side one, and the third sends.
//   node socketio_app.mjs DIRECT GATEWAY NAME PACKAGES
import { finish, opened, record, requireFrom, sleep, until } from "./recording.mjs";

const [direct, gateway, name, packages] = process.argv.slice(2);
const require = requireFrom(packages);
const { Server } = require("socket.io");
const { io: connect } = require("socket.io-client");
const { createAdapter } = require("@socket.io/mongo-adapter");
const mongodb = require("mongodb");
const given = record(mongodb, gateway);

const sender = await new mongodb.MongoClient(direct).connect();
await sender.db(name).dropDatabase();
await sender.db(name).createCollection("events", { capped: true, size: 1e6 });

const received = [[], []];
const servers = [];
for (const [number, uri] of [direct, gateway].entries()) {
  const client = await new mongodb.MongoClient(uri).connect();
  const server = new Server(0);
  server.adapter(createAdapter(client.db(name).collection("events"), { uid: `side${number}`, heartbeatInterval: 1000 }));
  server.on("connection", (socket) => socket.join(["everybody", `room${number}`]));
  server.on("asked", (n, answer) => answer(`${n} from a side`));
  await until(() => server.httpServer.address(), "a server to listen");
  const socket = connect(`http://127.0.0.1:${server.httpServer.address().port}`, { transports: ["websocket"] });
  socket.onAny((...message) => received[number].push(message));
  await until(() => socket.connected, "a client to be connected");
  servers.push({ server, socket });
}
await opened(given, 2);
const third = new Server(0);
const own = sender.db(name).collection("events");
third.adapter(createAdapter(own, { uid: "third", heartbeatInterval: 1000, requestsTimeout: 30_000 }));
await opened(given, 3);
await sleep(2500); // the three have heard of each other

// Each server leaves out what it sent itself. So what the third one sent is compared, without its heartbeats, whose
// number differs.
const HEARTBEAT = 2;
const ofThird = ([list]) =>
  list.filter((text) => {
    const { fullDocument } = JSON.parse(text);
    return fullDocument?.uid === "third" && Number(fullDocument.type.$numberInt) !== HEARTBEAT;
  });
async function step(action) {
  const before = ofThird(given.direct).length;
  const result = await action();
  await until(() => ofThird(given.direct).length > before, `an event of ${action}`);
  for (let tries = 0; tries < 500 && ofThird(given.gateway).length < ofThird(given.direct).length; tries++) await sleep(20);
  return result;
}

for (let number = 0; number < 10; number++) {
  await step(() => third.emit("hello", number, { text: "é", list: [1, null, number / 3] }, Buffer.from([number])));
}
await step(() => third.to("everybody").emit("to all", 1));
await step(() => third.to("room0").to("room1").emit("to rooms", 2));
const sockets = await step(() => third.fetchSockets());
await step(() => third.socketsJoin("late"));
await step(() => third.in("late").emit("to late", 3));
const answers = await step(
  () => new Promise((resolve) => third.serverSideEmit("asked", 4, (error, all) => resolve(error ? String(error) : all))),
);
servers.forEach(({ socket }) => socket.on("please", (answer) => answer("thank you")));
const thanks = await step(
  () => new Promise((resolve) => third.timeout(60_000).emit("please", (error, all) => resolve(error ? String(error) : all))),
);
await step(() => third.emit("the end"));
await until(() => received.every((list) => list.at(-1)?.[0] === "the end"), "the end");
await sleep(1000);
finish({
  given: { direct: [ofThird(given.direct)], gateway: [ofThird(given.gateway)] },
  seen: received,
  sockets: sockets.length,
  answers,
  thanks,
});
