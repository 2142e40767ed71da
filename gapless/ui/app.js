/** Puts the parts of the page together: what comes in, where it goes, and when the page is hidden. */

import { getJson, keyEvents } from "./api.js";
import { BubbleTable, Legend, idleByCause, summary } from "./bubbles.js";
import { Chat } from "./chat.js";
import { onTheme } from "./colours.js";
import { byId, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { duration } from "./format.js";
import { Gauges } from "./gauges.js";
import { History } from "./history.js";
import { askForKeys } from "./key.js";
import { PageMap } from "./kv.js";
import { Timeline } from "./lanes.js";
import { Poll } from "./poll.js";
import { ReportViewer } from "./reports.js";
import { Waterfall } from "./requests.js";
import { Settings } from "./settings.js";
import { themeButton } from "./theme.js";
import { TierTable } from "./tiers.js";
import { saveTrace } from "./trace.js";

const REQUESTS_SHOWN = 24;
/** Digits that change more often cannot be read. */
const NUMBERS_MS = 500;
const MAPS_MS = 1000;
const HEALTH_MS = 1000;
/** Keys typed here are for these elements, not for the page. */
const TYPED_AT = "input, textarea, select, button, summary, a, dialog";

const history = new History();
const timeline = new Timeline(byId("lanes"), history, { onDetail: showDetail, onView: showView });
const legend = new Legend(byId("legend"));
const table = new BubbleTable(byId("bubble-rows"), (gap) => timeline.showGap(gap));
const gauges = new Gauges(byId("gauges"));
const pages = new PageMap(byId("pages"), byId("page-legend"));
const tiers = new TierTable(byId("tier-rows"));
const waterfall = new Waterfall(byId("request-rows"), byId("request-axis"), chooseRequest);
const settings = new Settings({ changed: byId("changed"), all: byId("all-settings"), none: byId("none-changed") });
const chat = new Chat({
  form: byId("chat-form"), input: byId("chat-input"), log: byId("chat-log"), send: byId("chat-send"),
  stop: byId("chat-stop"), clear: byId("chat-clear"), model: byId("chat-model"), mode: byId("chat-mode"),
  temperature: byId("chat-temperature"), tokens: byId("chat-tokens"), schema: byId("chat-schema"), tools: byId("chat-tools"),
});
const reports = new ReportViewer({
  picker: byId("report-file"), zone: byId("report-zone"), status: byId("report-status"), view: byId("report-view"),
});
const feed = new Feed({ onEvent: takeEvent, onState: showState });

const state = { feed: "off", why: "", down: "" };
let newest = null;
let events = 0;

const polls = [
  new Poll(showNumbers, NUMBERS_MS),
  new Poll(showPages, MAPS_MS),
  new Poll(showRequests, MAPS_MS),
  new Poll(askHealth, HEALTH_MS),
];

function takeEvent(event) {
  events += 1;
  newest = event;
  history.add(event, performance.now());
}

async function showNumbers() {
  const { from, to } = timeline.range;
  const idle = idleByCause(history.gapsBetween(from, to), from, to);
  legend.show(idle, to - from);
  setText(byId("summary"), summary(history, from, to, idle));
  if (newest) gauges.show(newest, history);
  if (byId("bubble-table").open) table.show(history, from, to);
}

async function showPages() {
  if (state.feed !== "live") return;
  const report = await getJson("debug/kv");
  pages.show(report);
  tiers.show(report.tiers);
  setText(byId("page-caption"), pages.caption());
}

async function showRequests() {
  if (state.feed !== "live") return;
  const { requests } = await getJson(`debug/requests?limit=${REQUESTS_SHOWN}`);
  waterfall.show(requests, history);
}

/** 503 while the engine loads, is down or drains; the server says which. */
async function askHealth() {
  try {
    const response = await fetch("health", { cache: "no-store" });
    state.down = response.ok ? "" : (await response.json()).error.message;
  } catch {
    state.down = "the server does not answer";
  }
  showStatus();
}

async function showServer() {
  const [info, models] = await Promise.all([getJson("server_info"), getJson("v1/models")]);
  settings.show(info);
  chat.setModels(models.data.map((model) => model.id));
  const { model, device, dtype, depth } = info.info ?? {};
  const facts = [models.data[0]?.id ?? model, device, dtype, depth && `depth ${depth}`, `gapless ${info.version}`];
  setText(byId("model"), facts.filter(Boolean).join(" · "));
}

function showState(feedState, why) {
  Object.assign(state, { feed: feedState, why });
  if (feedState === "live") showServer().catch((error) => console.debug("no settings:", error.message));
  showStatus();
}

function showStatus() {
  const [kind, text] = statusOf();
  const pill = byId("status");
  pill.dataset.kind = kind;
  setText(pill, text);
}

function statusOf() {
  if (state.feed === "key") return ["down", "an API key is needed"];
  if (state.down) return ["down", state.down];
  if (state.feed === "lost") return ["down", `no step records: ${state.why}`];
  if (state.feed !== "live") return ["wait", state.feed === "off" ? "not watching" : "connecting"];
  return timeline.paused ? ["wait", "paused"] : ["live", "live"];
}

function showView() {
  byId("pause").setAttribute("aria-pressed", String(timeline.paused));
  setText(byId("span"), duration(timeline.view.span));
  if (!timeline.request) waterfall.clear();
  showStatus();
  showNumbers();
}

function chooseRequest(request) {
  timeline.showRequest(request);
  showDetail(request?.text ?? "");
}

function showDetail(text) {
  setText(byId("detail"), text || "Point at a step or a bubble, or use ↑ and ↓ in the timeline.");
}

/** The feed and all polls run only while the page can be seen. */
function watch() {
  if (document.hidden) {
    feed.stop();
    polls.forEach((poll) => poll.stop());
  } else {
    feed.start();
    polls.forEach((poll) => poll.start());
  }
}

function pageKeys(event) {
  if (event.key === "Escape" && !event.target.closest("input, textarea, dialog")) timeline.clear();
  if (event.key !== " " || event.target.closest(TYPED_AT)) return;
  event.preventDefault();
  timeline.togglePause();
}

async function save() {
  const { from, edge } = timeline.range;
  const status = byId("saved");
  try {
    setText(status, `saved ${await saveTrace((edge - from) / 1000)}`);
  } catch (error) {
    setText(status, `not saved: ${error.message}`);
  }
}

byId("pause").addEventListener("click", () => timeline.togglePause());
byId("zoom-in").addEventListener("click", () => timeline.zoom(0.5));
byId("zoom-out").addEventListener("click", () => timeline.zoom(2));
byId("save").addEventListener("click", save);
byId("bubble-table").addEventListener("toggle", showNumbers);
document.addEventListener("keydown", pageKeys);
document.addEventListener("visibilitychange", watch);
keyEvents.addEventListener("changed", () => feed.start());
askForKeys(byId("key-dialog"), byId("key-form"), byId("key-input"));
themeButton(byId("theme"));
onTheme(() => {
  timeline.redraw();
  pages.redraw();
});
showDetail("");
watch();

/** For tests and the curious: what has happened so far. */
const counters = {
  get events() { return events; },
  get steps() { return history.steps.length; },
  get gaps() { return history.gaps.length; },
  get connections() { return feed.connections; },
  get frames() { return timeline.frames; },
  get gauges() { return gauges.updates; },
  get pages() { return pages.updates; },
  get tiers() { return tiers.updates; },
  get requests() { return waterfall.updates; },
  get answers() { return chat.answers; },
  get reports() { return reports.shown; },
};
const restart = () => {
  feed.stop();
  feed.start();
};
Object.assign(window, { gapless: { counters, state, view: timeline.view, restart } });
