// The page as a whole: what has come from the server, which section is open, and how it is drawn anew.
import { decoded, el, SECTIONS, tailRow } from "./panels.js";

const TITLES = { overview: "Overview", tail: "Live tail", streams: "Streams", leases: "Leases", letters: "Dead letters", kept: "Lakes and tables", syncs: "Syncs", doctor: "Doctor", token: "Token", service: "Service" };
//: Which panels a section is drawn from.
const USES = { overview: ["activity", "shards", "leases", "streams", "letters"], tail: ["activity"], streams: ["streams"], leases: ["leases"], letters: ["letters"], kept: ["lakes", "tables", "archives"],
  syncs: ["syncs"], doctor: ["doctor"], token: [], service: ["service"] };
const TAIL_MAX = 200;
const panels = { known: {} };
const tail = { events: [], held: [], paused: false, filter: "", open: new Set(), same: false };
const letters = { open: new Set() };
const content = document.getElementById("content");

const section = () => {
  const name = location.hash.slice(1).split("?")[0];
  return name in TITLES ? name : "overview";
};

// -- the frame -------------------------------------------------------------------------------------------------------------

function badge(name) {
  const data = (panel) => (panels[panel] && panels[panel].data) || null;
  if (name === "letters" && data("letters") && data("letters").count) return ["bad", data("letters").count];
  if (name === "streams" && data("streams")) return ["", data("streams").count];
  if (name === "leases" && data("leases") && data("leases").leases.length) return ["", data("leases").leases.length];
  if (name === "doctor" && data("doctor")) {
    const wrong = data("doctor").filter((one) => one.status !== "ok");
    if (wrong.length) return [wrong.some((one) => one.status === "fail") ? "bad" : "warn", wrong.length];
  }
  return null;
}

function drawNav() {
  const links = Object.entries(TITLES).filter(([name]) => name !== "service" || "service" in panels.known).map(([name, title]) => {
    const found = badge(name);
    return el("a", { href: `#${name}`, "aria-current": section() === name ? "page" : null }, title, found ? el("span", { class: `badge ${found[0]}` }, Number(found[1]).toLocaleString("en-US")) : null);
  });
  document.getElementById("nav").replaceChildren(...links);
  const shards = panels.shards && panels.shards.data;
  if (shards) {
    const names = shards.shards.map((one) => one.name).join(", ");
    document.getElementById("deployment").textContent = `${shards.kind} ${names} · MongoDB ${shards.version}`;
  }
}

function draw() {
  const name = section();
  document.getElementById("title").textContent = TITLES[name];
  document.title = `${TITLES[name]} · Tailrace`;
  drawNav();
  if (name === "tail") return drawTail();
  if (name === "token") return drawToken();
  const drawn = SECTIONS[name](panels, letters);
  content.replaceChildren(...drawn.filter(Boolean));
}

// Drawn anew at most once for each frame, and only where what is open has changed.
let due = false;
function drawSoon(name) {
  if (name && !USES[section()].includes(name)) return drawNav();
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    if (section() !== "token") draw();
  });
}

// -- the live tail -----------------------------------------------------------------------------------------------------------

const fits = (event) => !tail.filter || `${event.operation} ${event.namespace} ${event.key}`.toLowerCase().includes(tail.filter.toLowerCase());
const rowOf = (event) => tailRow(event, tail.open.has(event.number), (open) => open ? tail.open.add(event.number) : tail.open.delete(event.number));

function drawTail() {
  let rows = document.getElementById("tail");
  if (!rows) {
    const pause = el("button", { class: "button", id: "pause", type: "button", "aria-pressed": String(tail.paused), onclick: () => {
      tail.paused = !tail.paused;
      pause.setAttribute("aria-pressed", String(tail.paused));
      pause.textContent = tail.paused ? "Paused: resume" : "Pause";
      if (!tail.paused) { tail.held.splice(0).forEach(keep); rows.replaceChildren(...tail.events.filter(fits).map(rowOf)); }
    } }, tail.paused ? "Paused: resume" : "Pause");
    const filter = el("input", { id: "filter", placeholder: "Filter by namespace, kind or _id", "aria-label": "Filter", spellcheck: "false", oninput: () => {
      tail.filter = filter.value;
      rows.replaceChildren(...tail.events.filter(fits).map(rowOf));
    } });
    filter.value = tail.filter;
    rows = el("div", { class: "rows", id: "tail" }, tail.events.filter(fits).map(rowOf));
    content.replaceChildren(el("div", { class: "tools" }, filter, pause), el("section", { class: "card" }, el("header", {}, el("h2", {}, "Changes as they come"), el("span", { class: "muted", id: "sampled" })), rows));
  }
  const activity = panels.activity && panels.activity.data;
  if (!activity) return;
  const most = activity.shownPerSecond;
  document.getElementById("sampled").textContent = activity.trouble ? activity.trouble
    : activity.perSecond > most ? `${most} of ${Math.round(activity.perSecond).toLocaleString("en-US")} events a second are shown` : `at most ${most} events a second are shown`;
}

function keep(event) {
  tail.events.unshift(event);
  for (const gone of tail.events.splice(TAIL_MAX)) tail.open.delete(gone.number);
}

function came(event) {
  if (tail.paused) {
    tail.held.push(event);
    tail.held.splice(0, tail.held.length - TAIL_MAX);
    return;
  }
  keep(event);
  const rows = document.getElementById("tail");
  if (!rows || !fits(event)) return;
  rows.prepend(rowOf(event));
  while (rows.children.length > TAIL_MAX) rows.lastChild.remove();
}

// -- the token decoder ---------------------------------------------------------------------------------------------------------

function drawToken() {
  const given = decodeURIComponent(location.hash.split("?").slice(1).join("?"));
  const answer = el("div", { id: "decoded" }, el("p", { class: "muted" }, "A token is the _data of an event's _id: a text of hexadecimal digits, or the whole document as JSON."));
  const input = el("input", { id: "token", placeholder: "8263…, or {\"_data\": \"8263…\"}", "aria-label": "Resume token", spellcheck: "false", autocomplete: "off", onkeydown: (event) => { if (event.key === "Enter") ask(); } });
  const ask = async () => {
    if (!input.value.trim()) return;
    try {
      const reply = await fetch(`/api/token?${new URLSearchParams({ token: input.value })}`);
      answer.replaceChildren(decoded(reply.ok ? await reply.json() : { error: await reply.text() }));
    } catch (failure) {
      answer.replaceChildren(decoded({ error: "the console does not answer" }));
    }
  };
  input.value = given;
  content.replaceChildren(el("div", { class: "token" }, input, el("button", { class: "button", type: "button", onclick: ask }, "Decode")), el("section", { class: "card" }, answer));
  if (given) ask();
}

// -- what comes from the server --------------------------------------------------------------------------------------------------

function connection(text, kind) {
  const shown = document.getElementById("connection");
  shown.textContent = text;
  shown.className = `pill ${kind}`;
}

function listen() {
  const source = new EventSource("/api/live");
  source.addEventListener("open", () => connection("live", "good"));
  source.addEventListener("error", () => connection("not connected: trying again", "bad"));
  source.addEventListener("panels", (message) => {
    panels.known = Object.fromEntries(JSON.parse(message.data).map((name) => [name, true]));
    drawSoon();
  });
  source.addEventListener("panel", (message) => {
    const panel = JSON.parse(message.data);
    panels[panel.name] = panel;
    drawSoon(panel.name);
  });
  source.addEventListener("events", (message) => {
    tail.events = JSON.parse(message.data).reverse();
    tail.open.clear();
    document.getElementById("tail")?.replaceChildren(...tail.events.filter(fits).map(rowOf));
  });
  source.addEventListener("event", (message) => came(JSON.parse(message.data)));
}

const THEMES = ["system", "light", "dark"];
function theme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = `Theme: ${name}`;
  try { localStorage.setItem("theme", name); } catch (denied) { /* kept for this page alone */ }
}
let chosen = "system";
try { chosen = localStorage.getItem("theme") || "system"; } catch (denied) { /* no storage: as the system has it */ }
theme(THEMES.includes(chosen) ? chosen : "system");
document.getElementById("theme").addEventListener("click", () => {
  chosen = THEMES[(THEMES.indexOf(chosen) + 1) % THEMES.length];
  theme(chosen);
});
window.addEventListener("hashchange", () => { document.getElementById("tail")?.remove(); draw(); });
window.addEventListener("resize", () => drawSoon());
draw();
listen();
