// How each section is drawn from what its panels gave. Every text from outside goes through `safe` into text nodes.
import { bars, KINDS, legend, minutes, series, spark } from "./charts.js";

// Characters that would steer or turn the text around them are shown as numbers, as in the terminal.
const STEERING = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
export const safe = (text) => String(text).replace(STEERING, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);

export function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "open") made.open = value;
    else made.setAttribute(name, value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    made.append(child instanceof Node ? child : safe(child));
  }
  return made;
}

export const count = (number) => Number(number).toLocaleString("en-US");
export const rate = (number) => number >= 1000 ? `${+(number / 1000).toFixed(1)}k` : `${+number.toFixed(number < 10 ? 1 : 0)}`;
export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");
const moment = (seconds) => new Date(seconds * 1000).toISOString().replace("T", " ").replace(".000Z", " UTC");
const some = (value) => value === null || value === undefined || value === "" ? "–" : value;

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 120) return `${Math.round(seconds * 10) / 10} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${+(seconds / 3600).toFixed(1)} h`;
  return `${+(seconds / 86400).toFixed(1)} days`;
}

export function bytes(number) {
  for (const unit of ["bytes", "kB", "MB", "GB"]) {
    if (number < 1000) return unit === "bytes" ? `${number} bytes` : `${number.toFixed(1)} ${unit}`;
    number /= 1000;
  }
  return `${number.toFixed(1)} TB`;
}

const pill = (text, kind) => el("span", { class: `pill ${kind || ""}` }, text);
const card = (title, note, ...inside) => el("section", { class: "card" }, el("header", {}, el("h2", {}, title), note ? el("span", { class: "muted" }, note) : null), inside);
const quiet = (...text) => el("section", { class: "card quiet" }, text);
const error = (panel, soft) => el("div", { class: soft ? "error soft" : "error" }, el("span", {}, panel.error), panel.hint ? el("span", { class: "hint" }, panel.hint) : null);
const facts = (pairs) => el("div", { class: "facts" }, pairs.map(([label, value]) => el("div", {}, el("span", { class: "label" }, label), el("span", { class: "value" }, some(value)))));

function table(columns, rows) {
  const head = columns.map(([name, kind]) => el("th", { class: kind, scope: "col" }, name));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)));
}

// A panel that has not come yet, or has failed; null where there is something to draw.
function missing(panel, title) {
  if (!panel) return quiet(`${title}: looking…`);
  if (panel.error) return card(title, null, error(panel));
  return null;
}

// -- overview --------------------------------------------------------------------------------------------------------

function tile(label, value, unit, note, kind, extra) {
  return el("div", { class: `tile ${kind || ""}` }, el("span", { class: "label" }, label),
    el("span", { class: "value" }, value, unit ? el("small", {}, unit) : null), extra || null, note ? el("span", { class: "note", title: safe(note) }, note) : null);
}

// Whether a listener may lose its place within the hour. An oplog that is complete has dropped nothing yet.
const scarce = (one) => one.left !== null && one.left < 3600 && !one.complete;

function tiles(panels) {
  const activity = panels.activity && panels.activity.data;
  const shards = panels.shards && panels.shards.data ? panels.shards.data.shards.filter((one) => !one.error) : [];
  const leases = panels.leases && panels.leases.data ? panels.leases.data.leases : null;
  const streams = panels.streams && panels.streams.data;
  const letters = panels.letters && panels.letters.data;
  const shortest = shards.length ? shards.reduce((a, b) => (a.reach <= b.reach ? a : b)) : null;
  const lags = (leases || []).filter((one) => one.lag !== null && !one.resource.includes("/"));
  const slowest = lags.length ? lags.reduce((a, b) => (a.lag >= b.lag ? a : b)) : null;
  const [reach, reachUnit] = shortest ? span(shortest.reach).split(" ") : ["–", ""];
  const [lag, lagUnit] = slowest ? span(slowest.lag).split(" ") : ["–", ""];
  return el("div", { class: "tiles" },
    tile("Events a second", activity ? rate(activity.perSecond) : "–", null, activity ? `${count(activity.total)} so far${activity.skipped ? `, gaps: ${count(activity.skipped)}` : ""}` : null, null, activity ? spark(activity) : null),
    tile("Slowest listener", lag, lagUnit, slowest ? slowest.resource : "no lease", slowest && scarce(slowest) ? "warn" : null),
    tile("Oplog reaches back", reach, reachUnit, shortest ? (shortest.complete ? `${shortest.name}: all of it` : shortest.name) : null, shortest && shortest.reach < 3600 && !shortest.complete ? "bad" : null),
    tile("Streams", streams ? count(streams.count) : "–", null, streams ? `${count(streams.gateway.connections)} connections` : "no gateway"),
    tile("Dead letters", letters ? count(letters.count) : "–", null, letters ? letters.collection : null, letters && letters.count ? "bad" : null));
}

function chart(activity) {
  const root = el("div", {});
  const whole = series(activity);
  const total = (kind) => whole.kinds[kind].reduce((a, b) => a + b, 0);
  const present = KINDS.filter((kind) => total(kind));
  const plain = `last ${minutes(activity)} minutes, events a second`;
  const note = el("span", { class: "muted" }, plain);
  const width = Math.max(420, Math.min(1440, document.getElementById("content").clientWidth - 38));
  const below = el("div", {}, legend(present.map((kind) => [kind, total(kind)])));
  root.append(bars(activity, width, 210, (at) => {
    note.textContent = at ? `at ${at.at}` : plain;
    below.replaceChildren(legend(present.map((kind) => [kind, at ? at.counts[kind] : total(kind)])));
  }), below);
  const made = card("Events by kind", null, root);
  made.querySelector("header").append(note);
  return made;
}

function namespaces(activity) {
  if (!activity.namespaces.length) return card("Busiest namespaces", null, el("p", { class: "muted" }, "No event in the last 15 minutes."));
  const sum = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);
  const most = sum(activity.namespaces[0][1]);
  const rows = activity.namespaces.slice(0, 12).map(([name, counts]) => {
    const meter = el("div", { class: "meter" });
    for (const kind of KINDS) {
      const number = kind === "other" ? sum(counts) - KINDS.slice(0, 4).reduce((all, one) => all + (counts[one] || 0), 0) : counts[kind] || 0;
      if (!number) continue;
      const part = el("i", { class: `k-${kind}`, title: `${kind}: ${count(number)}` });
      part.style.width = `${(number / most) * 100}%`;
      meter.append(part);
    }
    return el("tr", {}, el("td", { class: "name" }, name || "(whole deployment)", meter), el("td", { class: "number" }, count(sum(counts))));
  });
  const more = activity.namespaces.length - 12 + activity.more;
  return card("Busiest namespaces", more > 0 ? `${count(more)} more` : null, table([["namespace"], ["events", "number"]], rows));
}

function shardTable(panel) {
  const gone = missing(panel, "Shards");
  if (gone) return gone;
  const rows = panel.data.shards.map((one) => one.error
    ? el("tr", {}, el("td", { class: "name" }, one.name), el("td", { colspan: 3 }, error(one)))
    : el("tr", {}, el("td", { class: "name" }, one.name), el("td", { class: "number" }, span(one.lag)),
      el("td", { class: "number" }, span(one.quiet)), el("td", { class: "number" }, span(one.reach), one.complete ? el("div", { class: "note" }, "complete") : null)));
  return card(panel.data.kind === "sharded cluster" ? "Shards" : "Replica set", null,
    table([["oplog"], ["majority lags", "number"], ["last entry ago", "number"], ["reaches back", "number"]], rows));
}

function overview(panels) {
  const activity = panels.activity && panels.activity.data;
  const trouble = activity && activity.trouble ? card("The deployment cannot be followed", null, error({ error: activity.trouble })) : null;
  return [trouble, tiles(panels), activity ? chart(activity) : quiet("looking…"),
    el("div", { class: "columns" }, activity ? namespaces(activity) : null, shardTable(panels.shards))];
}

// -- a change ----------------------------------------------------------------------------------------------------------

export function difference(event, decode) {
  if (event.too_large) return el("p", { class: "muted" }, `The event has ${bytes(event.too_large)}: too much to be shown.`);
  const rows = event.rows.map(([how, path, before, after]) => el("tr", { class: how }, el("td", {}, path),
    el("td", { class: before === null && how !== "added" ? "before unknown" : "before" }, before === null ? (how === "added" ? "" : "not kept") : before),
    el("td", { class: "after" }, after === null ? "" : after)));
  const head = el("tr", {}, el("th", { scope: "col" }, "field"), el("th", { scope: "col" }, "before"), el("th", { scope: "col" }, "after"));
  return el("div", { class: "inside" },
    rows.length ? el("div", { class: "diff" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows))) : el("p", { class: "muted" }, "Nothing more is known about it."),
    event.left_out ? el("p", { class: "note" }, `${count(event.left_out)} further fields are not shown`) : null,
    event.token ? el("div", { class: "note mono" }, `token ${event.token.slice(0, 46)}${event.token.length > 46 ? "…" : ""}  `,
      el("a", { href: `#token?${encodeURIComponent(event.token)}`, onclick: decode }, "decode")) : null);
}

function summary(event) {
  const changed = event.rows.filter((row) => row[0] !== "same");
  if (event.operation === "update" || event.operation === "replace") return changed.map((row) => row[1]).slice(0, 6).join(", ");
  return changed.slice(0, 4).map((row) => `${row[1]}: ${row[3] ?? row[2]}`).join(", ");
}

const opClass = (name) => `op o-${["insert", "update", "replace", "delete"].includes(name) ? name : "other"}`;

export function tailRow(event, isOpen, toggled) {
  const root = el("details", { class: "row", open: isOpen },
    el("summary", {}, el("span", { class: "muted number" }, clock(event.at)), el("span", { class: opClass(event.operation) }, event.operation),
      el("span", {}, event.namespace || "(whole deployment)"), el("span", { class: "mono" }, some(event.key)), el("span", { class: "muted" }, summary(event))));
  if (isOpen) root.append(difference(event));
  root.addEventListener("toggle", () => {
    if (root.open && root.children.length === 1) root.append(difference(event));
    toggled(root.open);
  });
  return root;
}

// -- who reads -----------------------------------------------------------------------------------------------------------

function streams(panels) {
  const panel = panels.streams;
  if (panel && panel.error && panel.error.includes("not a gateway")) {
    return [quiet("No gateway is shown. Name one with --gateway URI to see its streams, and the processes that compute for them.")];
  }
  const gone = missing(panel, "Streams");
  if (gone) return [gone];
  const { gateway, processes, count: number } = panel.data;
  const rows = panel.data.streams.slice(0, 200).map((one) => el("tr", {}, el("td", { class: "name" }, one.ns), el("td", {}, one.users.join(", ") || "–"),
    el("td", { class: "number" }, span(one.seconds)), el("td", { class: "number" }, count(one.events)),
    el("td", {}, pill(one.state, one.state.startsWith("computes") ? "warn" : one.state === "waits" ? "good" : "")), el("td", { class: "mono muted number" }, one.cursor)));
  const busy = processes.map((one) => el("tr", {}, el("td", { class: "mono" }, one.pid), el("td", { class: "number" }, count(one.streams)),
    el("td", { class: "number" }, `${one.cpuSeconds.toFixed(1)} s`), el("td", {}, one.computing === null || one.computing === undefined ? "idle" : `computes for ${one.computing}`)));
  return [
    card("Gateway", null, gateway.trouble ? error({ error: gateway.trouble }) : null, facts([["streams", count(number)], ["connections", count(gateway.connections)], ["lag", span(gateway.lagSeconds)],
      ["oplog in memory", bytes(gateway.windowBytes)], ["streams that read for themselves", count(gateway.fallbacks)]]),
    busy.length ? table([["process"], ["streams", "number"], ["CPU", "number"], ["doing"]], busy) : null),
    card("Streams", number > rows.length ? `${count(number - rows.length)} more` : null,
      rows.length ? table([["namespace"], ["user"], ["open for", "number"], ["events", "number"], ["state"], ["cursor", "number"]], rows) : el("p", { class: "muted" }, "Nobody watches.")),
  ];
}

const STATES = { held: "good", "partly held": "warn", expired: "bad", unreadable: "bad", paused: "warn", pausing: "warn" };

function leases(panels) {
  const gone = missing(panels.leases, "Leases");
  if (gone) return [gone];
  const { leases: every, store, sealed } = panels.leases.data;
  if (!every.length) return [quiet(`No listener has a lease in ${safe(store)}. tailrace listen makes one.`)];
  const names = new Set(every.map((one) => one.resource));
  const rows = every.map((one) => {
    const said = [one.trouble, one.paused ? `paused since ${one.paused}` : null, one.reserved ? `reserved for ${one.reserved}` : null, one.skip ? "the next change will be left out" : null,
      one.gaps ? `${count(one.gaps)} gaps: changes that were not handled` : null].filter(Boolean);
    const isLane = names.has(one.resource.slice(0, one.resource.lastIndexOf("/")));
    return el("tr", { class: isLane ? "lane" : "" }, el("td", { class: "name" }, one.resource, said.map((text) => el("div", { class: "note" }, text))),
      el("td", {}, pill(one.state, STATES[one.state])), el("td", { class: "number" }, some(one.version)), el("td", { class: "number" }, span(one.lag)),
      el("td", { class: "number" }, one.complete ? "all of it" : scarce(one) ? pill(span(one.left), "bad") : span(one.left)), el("td", {}, some(one.owner), one.age !== null ? el("div", { class: "note" }, `for ${span(one.age)}`) : null),
      el("td", { class: "muted" }, some(one.committed)));
  });
  return [card("Leases and lanes", sealed ? `${count(sealed)} sealed lanes are not shown` : store, table([["resource"], ["state"], ["fencing token", "number"], ["lag", "number"], ["oplog left", "number"], ["owner"], ["committed"]], rows)),
    el("p", { class: "note" }, "Oplog left: for how long the deployment still holds what this listener reads next. At 0 its place is lost.")];
}

function letters(panels, state) {
  const gone = missing(panels.letters, "Dead letters");
  if (gone) return [gone];
  const { letters: every, count: number, collection } = panels.letters.data;
  if (!every.length) return [quiet(`No dead letters in ${safe(collection)}.`)];
  const rows = every.map((one) => {
    const key = `${one.resource} ${one.change}`;
    const root = el("details", { class: "row letter", open: state.open.has(key) },
      el("summary", {}, el("span", { class: "muted number" }, one.at.slice(5, 16).replace("T", " ")), el("span", { class: opClass(one.operationType) }, one.operationType), el("span", {}, one.namespace),
        el("span", {}, one.resource), el("span", { class: "muted" }, `${one.error}: ${one.reason}`)),
      el("div", { class: "inside" }, el("div", { class: "error" }, el("b", {}, one.error), el("span", {}, one.reason)),
        facts([["resource", one.resource], ["tries", count(one.tries)], ["fencing token", one.version], ["document", some(one.documentKey)], ["at", one.at.replace("T", " ").slice(0, 19)]]),
        one.event ? difference(one.event) : el("p", { class: "muted" }, "The event was too large to be kept.")));
    root.addEventListener("toggle", () => root.open ? state.open.add(key) : state.open.delete(key));
    return root;
  });
  return [card("Dead letters", number > every.length ? `the oldest ${every.length} of ${count(number)}` : collection, el("div", { class: "rows" }, rows)),
    el("p", { class: "note" }, "tailrace dead-letters replay hands them to a handler again.")];
}

// -- what is kept ----------------------------------------------------------------------------------------------------------

function lakeCard(one) {
  if (one.error) return card(one.place, "lake", error(one));
  const data = one.data;
  return card(one.place, "lake", facts([["events", count(data.rows)], ["files", count(data.files)], ["size", bytes(data.bytes)], ["days", data.firstDay ? `${data.firstDay} to ${data.lastDay}` : "–"],
    ["last event", data.lastClusterTime ? moment(data.lastClusterTime.t) : "–"], ["last micro-batch", data.lastCommit ? data.lastCommit.replace("T", " ").slice(0, 19) : "–"],
    ["its lag", data.lagMs === null ? "–" : span(data.lagMs / 1000)], ["commits", count(data.commits)]]),
  data.quarantined ? el("div", { class: "error" }, `${count(data.quarantined)} events are in quarantine`) : null,
  data.gaps.map((text) => el("p", { class: "note" }, `accepted gap: ${safe(text)}`)));
}

function tablesCard(one) {
  if (one.error) return card(one.place, "tables", error(one));
  const data = one.data;
  const rows = data.tables.map((table) => el("tr", {}, el("td", { class: "name" }, table.namespace, table.trouble ? el("div", { class: "note" }, table.trouble) : null), el("td", { class: "number" }, count(table.rows)),
    el("td", { class: "number" }, count(table.files)), el("td", { class: "number" }, bytes(table.bytes)), el("td", { class: "number" }, count(table.version)), el("td", { class: "muted" }, table.changed ? moment(Number(table.changed.split(",")[0])) : "never")));
  return card(one.place, "tables", facts([["equal their collections at", data.time ? moment(data.time.t) : "no time yet: a copy has not caught up"], ["lag", span(data.lag)]]),
    rows.length ? table([["collection"], ["rows", "number"], ["files", "number"], ["size", "number"], ["version", "number"], ["changed"]], rows) : el("p", { class: "muted" }, "No collection matches."));
}

function archiveCard(one) {
  if (one.error) return card(one.place, "archive", error(one));
  const rows = one.data.map((oplog) => el("tr", {}, el("td", { class: "name" }, oplog.name, oplog.segments ? null : el("div", { class: "note" }, "nothing is archived yet"), oplog.faults.map((text) => el("div", { class: "error" }, text))), el("td", { class: "number" }, count(oplog.segments)),
    el("td", { class: "number" }, count(oplog.entries)), el("td", { class: "number" }, count(oplog.images)), el("td", { class: "number" }, bytes(oplog.bytes)),
    el("td", { class: "muted" }, oplog.after === null ? "–" : moment(oplog.after)), el("td", { class: "muted" }, oplog.until === null ? "–" : moment(oplog.until))));
  return card(one.place, "archive", table([["oplog"], ["segments", "number"], ["entries", "number"], ["pre-images", "number"], ["size", "number"], ["from"], ["to"]], rows));
}

function kept(panels) {
  const found = [];
  for (const [name, title, draw] of [["lakes", "Lakes", lakeCard], ["tables", "Tables", tablesCard], ["archives", "Archives", archiveCard]]) {
    if (!(name in panels.known)) continue;
    const gone = missing(panels[name], title);
    if (gone) found.push(gone);
    else found.push(...panels[name].data.map(draw));
  }
  return found.length ? found : [quiet("No directory is shown. Name some with --lake DIR, --tables DIR and --archive DIR.")];
}

function syncs(panels) {
  if (!("syncs" in panels.known)) return [quiet("No sync is shown. Name the target of one with --sync TARGET.")];
  const gone = missing(panels.syncs, "Syncs");
  if (gone) return [gone];
  return panels.syncs.data.flatMap((target) => target.error ? [card(target.place, "target", error(target))]
    : target.data.length ? target.data.map((one) => card(one.name, target.place, facts([["phase", one.phase], ["equals the source", one.isConsistent ? "yes" : "not yet"], ["lag", span(one.lagSeconds)],
      ["oplog left", span(one.reachSeconds)], ["documents copied", `${count(one.documents)}${one.of ? ` of ${count(one.of)}` : ""}`], ["changes a second", one.changesPerSecond], ["owner", one.owner], ["position", one.time]]),
    one.paused ? pill("paused", "warn") : null, one.verified ? el("p", { class: "note" }, `verified at ${one.verified.time}: ${count(one.verified.documents)} documents, differences: ${one.verified.differences}`) : null))
      : [card("No sync", target.place, el("p", { class: "muted" }, "There is none on this target."))]);
}

const MARKS = { ok: "good", warn: "warn", fail: "bad" };

function doctor(panels) {
  const gone = missing(panels.doctor, "Doctor");
  if (gone) return [gone];
  return [card("What tailrace doctor says", `checked at ${clock(panels.doctor.at)}`, panels.doctor.data.map((one) => el("div", { class: "finding" }, pill(one.status, MARKS[one.status]),
    el("div", {}, el("b", {}, one.check), el("div", {}, one.found), one.advice ? el("div", { class: "note" }, one.advice) : null))))];
}

export function decoded(answer) {
  if (answer.error) return error(answer);
  const token = answer.token;
  const rows = [["cluster time", `Timestamp(${token.clusterTime.t}, ${token.clusterTime.i})`], ["date", token.date], ["version", token.version], ["type", token.tokenType],
    ["operation in its transaction", token.txnOpIndex], ["from an invalidate", token.fromInvalidate ? "yes" : "no"], ["collection UUID", some(token.uuid)],
    ["event identifier", token.eventIdentifier === null ? "–" : JSON.stringify(token.eventIdentifier)], ["fragment", some(token.fragmentNum)]];
  return table([["part"], ["value"]], rows.map(([name, value]) => el("tr", {}, el("td", { class: "name" }, name), el("td", { class: "mono" }, String(value)))));
}

function service(panels) {
  const gone = missing(panels.service, "Service");
  if (gone) return [gone];
  const rows = panels.service.data.map((one) => el("tr", {}, el("td", { class: "name mono" }, one.name), el("td", { class: "muted" }, one.text), el("td", { class: "number" }, one.values.map(([label, value]) => el("div", {}, label ? `${label}: ${count(value)}` : count(value))))));
  return [card("What this service says of itself", null, table([["metric"], ["what it is"], ["value", "number"]], rows))];
}

export const SECTIONS = { overview, streams, leases, letters, kept, syncs, doctor, service };
