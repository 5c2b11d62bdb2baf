// parse-server with schema hooks: two servers, one on each side, that hear of each other's schemas by a change stream.
//   node parse_app.mjs DIRECT GATEWAY NAME PACKAGES
// Each server is a process of its own, since they share their cache of schemas otherwise.
import { fork } from "node:child_process";
import { fileURLToPath } from "node:url";
import { count, finish, record, requireFrom, sleep, until } from "./recording.mjs";

const headers = { "X-Parse-Application-Id": "app", "X-Parse-Master-Key": "master", "Content-Type": "application/json" };

async function serve(uri, gateway, packages) {
  process.env.PARSE_SERVER_LOGS_FOLDER = "null"; // when it is loaded, its logger opens files in the current directory
  const require = requireFrom(packages);
  const mongodb = requireFrom(`${packages}/node_modules/parse-server`)("mongodb");
  const given = record(mongodb, gateway);
  const express = require("express");
  const { ParseServer } = require("parse-server");
  const app = express();
  const http = app.listen(0, "127.0.0.1");
  await until(() => http.address(), "a server to listen");
  const server = new ParseServer({
    databaseURI: uri,
    appId: "app",
    masterKey: "master",
    masterKeyIps: ["127.0.0.1", "::1"],
    serverURL: `http://127.0.0.1:${http.address().port}/parse`,
    databaseOptions: { enableSchemaHooks: true },
    allowClientClassCreation: true,
    silent: true,
    logsFolder: null,
  });
  await server.start();
  app.use("/parse", server.app);
  process.on("message", () => process.send({ given: given.gateway.length ? given.gateway : given.direct }));
  process.on("disconnect", () => process.exit(0));
  process.send({ url: `http://127.0.0.1:${http.address().port}/parse` });
}

async function main(direct, gateway, name, packages) {
  const { MongoClient } = requireFrom(`${packages}/node_modules/parse-server`)("mongodb");
  const client = await new MongoClient(direct).connect();
  await client.db(name).dropDatabase();
  await client.db(name).createCollection("_SCHEMA");
  const at = (uri) => uri.replace("/?", `/${name}?`);
  const sides = [];
  for (const uri of [direct, gateway]) {
    const child = fork(fileURLToPath(import.meta.url), ["serve", at(uri), gateway, packages], {
      stdio: ["ignore", "ignore", "inherit", "ipc"], // it prints to its standard output
    });
    const answers = [];
    child.on("message", (message) => answers.push(message));
    const ask = async () => {
      const before = answers.length;
      child.send("tell");
      await until(() => answers.length > before, "a server's answer");
      return answers.at(-1).given;
    };
    await until(() => answers.length || child.exitCode !== null, "a server to start");
    sides.push({ child, ask, url: answers[0].url });
    await client.db(name).collection("_SCHEMA").updateOne({ _id: "_User" }, { $set: { [`started${sides.length}`]: "string" } });
    await sleep(500);
  }
  const start = sides.map(() => 0);
  // What the second one has not seen, since it was started later, is left out on the first side.
  for (const [number, side] of sides.entries()) start[number] = count(await side.ask());
  const rest = async (side, method, path, body) => {
    const answer = await fetch(`${sides[side].url}/${path}`, { method, headers, body: body && JSON.stringify(body) });
    if (!answer.ok) throw new Error(`${method} ${path}: ${answer.status} ${await answer.text()}`);
    return answer.json();
  };
  const schemas = async (side) => (await rest(side, "GET", "schemas")).results.sort((a, b) => (a.className < b.className ? -1 : 1));
  for (let number = 0; number < 6; number++) {
    const writer = number % 2;
    await rest(writer, "POST", `classes/Game${number}`, { score: number, player: "ann", where: { __type: "GeoPoint", latitude: 1, longitude: 2 } });
    await rest(1 - writer, "POST", `schemas/Made${number}`, { className: `Made${number}`, fields: { a: { type: "String" }, b: { type: "Number" } } });
    await rest(writer, "PUT", `schemas/Made${number}`, { className: `Made${number}`, fields: { a: { __op: "Delete" }, c: { type: "Array" } } });
    const known = async () => JSON.stringify(await schemas(0)) === JSON.stringify(await schemas(1));
    await until(known, "both servers to know the same classes");
  }
  await rest(0, "DELETE", "schemas/Made0");
  await until(async () => !(await schemas(1)).some((schema) => schema.className === "Made0"), "a class to be gone");
  await sleep(2000);
  const lists = await Promise.all(sides.map((side) => side.ask()));
  const [mine, theirs] = lists.map((list, number) => [list.flat().slice(start[number])]);
  const seen = [await schemas(0), await schemas(1)].map((one) => JSON.stringify(one));
  sides.forEach(({ child }) => child.kill());
  finish({ given: { direct: mine, gateway: theirs }, seen });
}

const [first, ...others] = process.argv.slice(2);
await (first === "serve" ? serve(...others) : main(first, ...others));
