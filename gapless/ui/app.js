/** Puts the parts of the page together: what comes in, where it goes, and when the page is hidden. */

import { getJson, keyEvents } from "./api.js";
import { BubbleTable, Legend, idleByCause, longestBubbles, summary } from "./bubbles.js";
import { onTheme } from "./colours.js";
import { byId, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { duration } from "./format.js";
import { Gauges } from "./gauges.js";
import { History } from "./history.js";
import { askForKeys } from "./key.js";
import { PageMap } from "./kv.js";
import { Timeline } from "./lanes.js";
import { Machine } from "./machine.js";
import { Poll } from "./poll.js";
import { ReportViewer } from "./reports.js";
import { Waterfall } from "./requests.js";
import { Samples } from "./samples.js";
import { Settings } from "./settings.js";
import { themeButton } from "./theme.js";
import { TierTable } from "./tiers.js";
import { saveTrace } from "./trace.js";
import { Trends } from "./trends.js";
import { Why } from "./why.js";

const REQUESTS_SHOWN = 24;
/** Digits that change more often cannot be read. */
const NUMBERS_MS = 500;
const MAPS_MS = 1000;
const SAMPLES_MS = 1000;
/** All that the server remembers; these are searched. */
const REQUESTS_KEPT = 500;
const STALL_SECONDS = 30;
const HEALTH_MS = 1000;
/** Keys typed here are for these elements, not for the page. */
const TYPED_AT = "input, textarea, select, button, summary, a, dialog";

const history = new History();
const timeline = new Timeline(byId("lanes"), history, { onDetail: showDetail, onView: showView });
const legend = new Legend(byId("legend"), byId("mends"));
const table = new BubbleTable(byId("bubble-rows"), (gap) => timeline.showGap(gap));
const samples = new Samples();
const gauges = new Gauges(byId("gauges"));
const trends = new Trends(byId("trends"), byId("ranges"), samples);
const why = new Why(byId("why"), (at) => trends.hold(at - STALL_SECONDS, at + STALL_SECONDS));
const machine = new Machine(byId("machine-rows"));
const pages = new PageMap(byId("pages"), byId("page-legend"));
const tiers = new TierTable(byId("tier-rows"));
const waterfall = new Waterfall(byId("request-rows"), byId("request-axis"), chooseRequest);
const settings = new Settings({ changed: byId("changed"), all: byId("all-settings"), none: byId("none-changed") });
const reports = new ReportViewer({
  picker: byId("report-file"), zone: byId("report-zone"), status: byId("report-status"), view: byId("report-view"),
});
const feed = new Feed({ onEvent: takeEvent, onState: showState });

const state = { feed: "off", why: "", down: "" };
let newest = null;
let info = {};
let events = 0;

const polls = [
  new Poll(showNumbers, NUMBERS_MS),
  new Poll(showSamples, SAMPLES_MS),
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
  if (byId("bubble-table").open) table.show(history, from, to);
}

async function showSamples() {
  if (state.feed !== "live" || !newest) return;
  samples.add(await getJson(`debug/history?after=${samples.next}`));
  gauges.show(samples, newest, history);
  trends.show();
  why.show(samples, info);
  machine.show(samples, newest, info);
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
  const sought = byId("request-search").value.trim();
  const { requests } = await getJson(`debug/requests?limit=${sought ? REQUESTS_KEPT : REQUESTS_SHOWN}`);
  waterfall.show(requests.filter((request) => isOf(request, sought)).slice(-REQUESTS_SHOWN), history);
}

/** Whether a request has this text in one of its names: the answer's, or the client's own. */
function isOf(request, text) {
  return [request.id, request.request_id].some((name) => name?.includes(text));
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
  const [server, models] = await Promise.all([getJson("server_info"), getJson("v1/models")]);
  settings.show(server);
  info = server.info ?? {};
  const { model, device, dtype, depth, ranks } = info;
  const name = models.data[0]?.id ?? model;
  const facts = [name, device, ranks > 1 && `${ranks} ranks`, dtype, depth && `depth ${depth}`, `gapless ${server.version}`];
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
byId("request-search").addEventListener("input", () => showRequests().catch(() => {}));
byId("bubble-table").addEventListener("toggle", showNumbers);
document.addEventListener("keydown", pageKeys);
document.addEventListener("visibilitychange", watch);
keyEvents.addEventListener("changed", () => feed.start());
askForKeys(byId("key-dialog"), byId("key-form"), byId("key-input"));
themeButton(byId("theme"));
onTheme(() => {
  timeline.redraw();
  trends.redraw();
  pages.redraw();
});
showDetail("");
watch();

/** For tests and the curious: what has happened so far. */
const counters = {
  get events() { return events; },
  get steps() { return history.steps.length; },
  get gaps() { return history.gaps.length; },
  get bubbles() { return longestBubbles(history, timeline.range.from, timeline.range.to).length; },
  get connections() { return feed.connections; },
  get frames() { return timeline.frames; },
  get gauges() { return gauges.updates; },
  get pages() { return pages.updates; },
  get tiers() { return tiers.updates; },
  get requests() { return waterfall.updates; },
  get samples() { return samples.length; },
  get reports() { return reports.shown; },
};
const restart = () => {
  feed.stop();
  feed.start();
};
Object.assign(window, { gapless: { counters, state, view: timeline.view, trends, restart } });
