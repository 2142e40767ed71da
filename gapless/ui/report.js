// Draws an A/B report (the JSON of `gapless ab`, schema 1) into an element. Used by the one-file HTML report and by the
// live page. Text goes in as text nodes only, nothing is fetched, and no inline style or handler is written.

const SIGNS = { better: "✓", worse: "✗", same: "≈", unknown: "?" };
const WORDS = { better: "better", worse: "worse", same: "within noise", unknown: "too few runs" };
const FIGURES = { ttft: "Time to first token", tpot: "Time per output token", itl: "Gap between tokens", e2el: "Whole request" };
const SVG = "http://www.w3.org/2000/svg";
/** Of charts: that of the report, so that their text keeps its size. */
let width = 720;

/** Fill `element` with the report; whatever was in it is replaced. Throws an Error for a JSON that is no such report. */
export function renderReport(element, report) {
  if (!report || report.kind !== "gapless-ab") throw new Error("this is no report of gapless ab");
  if (report.schema !== 1) throw new Error(`report schema ${report.schema} is not known here; this page knows 1`);
  width = Math.min(1340, Math.max(560, (element.clientWidth || 720) - 32));
  const root = h("article", { class: "gapless-report" },
    header(report), alerts(report), table(report), forest(report), runs(report), distributions(report),
    sides(report), details(report), notes(report));
  element.replaceChildren(root);
}

// ---- small tools

function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) if (value !== null) node.setAttribute(name, value);
  for (const child of children.flat(Infinity)) if (child !== null && child !== "") node.append(child);
  return node;
}

function percent(share, digits = Math.abs(share) < 0.1 ? 2 : Math.abs(share) < 1 ? 1 : 0) {
  if (share === null || share === undefined) return "n/a";
  const text = (share * 100).toFixed(digits);
  return `${Number(text) > 0 ? "+" : ""}${text.replace("-", "−")} %`;
}

function figure(value) {
  if (value === null || value === undefined) return "n/a";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return value.toPrecision(size >= 100 ? 4 : 3).replace("-", "−");
}

function withSpread(mean, std) {
  if (!(std > 0)) return figure(mean);
  const digits = Math.min(6, Math.max(0, 1 - Math.floor(Math.log10(std))));
  return `${mean.toFixed(digits)} ± ${std.toFixed(digits)}`;
}

function pValue(p) {
  if (p === null || p === undefined) return "n/a";
  return p < 0.0001 ? "< 0.0001" : p.toPrecision(2);
}

/** What may be wider than a narrow screen: it scrolls by itself, also by keyboard. */
function wide(name, ...children) {
  return h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": `${name}, scrolls sideways` }, ...children);
}

function section(title, ...children) {
  return h("section", { "aria-label": title }, h("h2", {}, title), ...children);
}

function rounds(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= raw);
  const ticks = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) ticks.push(Math.abs(at) < step / 1e6 ? 0 : at);
  return ticks;
}

function short(value) {
  return String(Number(value.toPrecision(6)));
}

// ---- the head

function header(report) {
  const [a, b] = report.arms;
  const counts = {};
  for (const row of report.metrics) counts[row.verdict] = (counts[row.verdict] || 0) + 1;
  const verdicts = Object.keys(SIGNS).filter((v) => counts[v]).map((v) => `${SIGNS[v]} ${counts[v]} ${WORDS[v]}`).join(" · ");
  return h("header", {},
    h("h1", {}, "A/B report"),
    h("p", { class: "arms" }, arm(a), " against ", arm(b)),
    h("p", { class: "summary" }, `B compared with A: ${verdicts || "no metric"}`),
    h("p", { class: "summary" }, sameTokens(report.tokens)));
}

function arm(side) {
  return h("span", { class: `arm arm-${side.letter.toLowerCase()}` }, h("b", {}, side.letter), " ", h("code", {}, side.name));
}

function sameTokens(tokens) {
  if (!tokens.compared) return "Same tokens? No answers could be compared.";
  if (!tokens.differ) return `✓ Both arms produced the same output for all ${tokens.compared} prompts (compared by ${tokens.by}).`;
  const f = tokens.first;
  return `✗ ${tokens.differ} of ${tokens.compared} answers differ (compared by ${tokens.by}). First: seed ${f.seed}, ` +
    `prompt ${f.place}, position ${f.at}: A has ${f.a || "ended"}, B has ${f.b || "ended"}.`;
}

function alerts(report) {
  const rules = report.rules.map((r) => h("li", { class: r.failed ? "bad" : "good" },
    `${r.failed ? "✗" : "✓"} --fail-if ${r.rule}${r.why ? `: ${r.why}` : ": does not hold"}`));
  const warnings = report.warnings.map((text) => h("li", {}, text));
  return h("div", {},
    rules.length ? section("Rules", h("ul", { class: "rules" }, rules)) : null,
    warnings.length ? section("To keep in mind", h("ul", { class: "warnings" }, warnings)) : null);
}

// ---- the table

function table(report) {
  const n = report.design.pairs;
  const level = `${short((1 - report.design.alpha) * 100)} % interval`;
  const heads = ["Metric", `A (${n} runs)`, `B (${n} runs)`, "Δ", level, "p (Holm)", "Verdict", "Detectable", "Behind the tail"];
  return section("Results",
    wide("Results",
      h("table", { class: "results" },
        h("caption", {}, "Mean ± sample standard deviation over runs. Δ is B minus A as a share of A."),
        h("thead", {}, h("tr", {}, heads.map((text) => h("th", { scope: "col" }, text)))),
        h("tbody", {}, report.metrics.map(tableRow)))));
}

function tableRow(row) {
  const unit = row.unit === "ms" ? " [ms]" : "";
  return h("tr", {},
    h("th", { scope: "row" }, `${row.label}${unit} ${row.higher_is_better ? "↑" : "↓"}`),
    h("td", {}, withSpread(row.a_mean, row.a_std)),
    h("td", {}, withSpread(row.b_mean, row.b_std)),
    h("td", {}, percent(row.delta)),
    h("td", {}, row.low === null ? "n/a" : `${percent(row.low)} … ${percent(row.high)}`),
    h("td", {}, pValue(row.p_holm)),
    h("td", { class: `verdict ${row.verdict}` }, h("b", {}, SIGNS[row.verdict]), ` ${WORDS[row.verdict]}`),
    h("td", {}, row.detectable === null ? "n/a" : percent(row.detectable).replace("+", "")),
    h("td", {}, row.a_tail ? `${row.a_tail.behind} of ${row.a_tail.samples}; ${row.a_tail.behind_a_run} a run` : ""));
}

// ---- differences with their intervals

function forest(report) {
  const rows = report.metrics.filter((row) => row.low !== null);
  if (!rows.length) return null;
  const left = 190, right = 20, line = 30, top = 10, bottom = 36;
  const height = top + rows.length * line + bottom;
  // One metric with a huge interval must not squeeze all others: the axis ends at three times the middle one's reach.
  const reaches = rows.map((r) => Math.max(Math.abs(r.low), Math.abs(r.high))).sort((x, y) => x - y);
  const reach = Math.min(reaches.at(-1), 3 * reaches[Math.floor(reaches.length / 2)]) * 1.08 || 0.01;
  const x = (share) => left + ((Math.max(-reach, Math.min(reach, share)) + reach) / (2 * reach)) * (width - left - right);
  const base = height - bottom;
  const grid = rounds(-reach, reach, 8).map((t) => s("g", {},
    s("line", { class: t === 0 ? "zero" : "grid", x1: x(t), x2: x(t), y1: top, y2: base }),
    s("text", { x: x(t), y: base + 16, "text-anchor": "middle" }, percent(t, reach < 0.02 ? 1 : 0))));
  const marks = rows.map((row, k) => forestMark(row, top + (k + 0.5) * line, left, x, reach));
  const label = rows.map((r) => `${r.label} ${percent(r.delta)}, ${WORDS[r.verdict]}`).join("; ");
  return section("Differences", wide("Differences", s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    grid, marks, s("text", { class: "axis", x: x(0), y: height - 4, "text-anchor": "middle" }, "B minus A, share of A"))));
}

function forestMark(row, y, left, x, reach) {
  const text = `${row.label}: ${percent(row.delta)} (${percent(row.low)} … ${percent(row.high)}), ${WORDS[row.verdict]}`;
  const cut = (share, at, dx) => Math.abs(share) > reach
    ? s("path", { class: row.verdict, d: `M${at - dx} ${y - 4}L${at} ${y}L${at - dx} ${y + 4}` }) : null;
  return s("g", { class: "mark" }, s("title", {}, text),
    s("text", { x: left - 12, y: y + 4, "text-anchor": "end" }, `${SIGNS[row.verdict]} ${row.label} ${row.higher_is_better ? "↑" : "↓"}`),
    s("line", { class: row.verdict, x1: x(row.low), x2: x(row.high), y1: y, y2: y }),
    cut(row.low, x(row.low), -6), cut(row.high, x(row.high), 6),
    s("circle", { class: row.verdict, cx: x(row.delta), cy: y, r: 5 }));
}

// ---- the runs in the order of time

function runs(report) {
  if (!report.metrics.length) return null;
  return chooser("Runs in the order of time", "Metric", report.metrics.map((m) => [m.key, m.label]), (key) => runsPlot(report, key));
}

function chooser(title, what, options, draw) {
  const place = h("div", {});
  const select = h("select", {}, options.map(([value, text]) => h("option", { value }, text)));
  const redraw = () => place.replaceChildren(draw(select.value));
  select.addEventListener("change", redraw);
  redraw();
  return section(title, h("label", {}, `${what} `, select), place);
}

function runsPlot(report, key) {
  const row = report.metrics.find((m) => m.key === key);
  const shown = report.runs.filter((r) => key in r.metrics);
  const values = shown.map((r) => r.metrics[key]);
  const plot = frame(values, shown.length, row.unit, "run, in the order of time");
  const at = shown.map((r, k) => [plot.x(k + 0.5), plot.y(r.metrics[key]), r]);
  const links = at.filter(([, , r]) => r.first).map(([x1, y1, r]) => {
    const other = at.find(([, , q]) => q.pair === r.pair && !q.first);
    return other ? s("line", { class: "link", x1, y1, x2: other[0], y2: other[1] }) : null;
  });
  const marks = at.map(([x, y, r]) => mark(r.arm, x, y,
    `${r.arm}, pair ${r.pair + 1}, seed ${r.seed}: ${figure(r.metrics[key])} ${row.unit}`));
  const label = `${row.label} of each run. A: ${withSpread(row.a_mean, row.a_std)}, B: ${withSpread(row.b_mean, row.b_std)} ${row.unit}`;
  const plotted = s("svg", { viewBox: plot.box, role: "img", "aria-label": label }, plot.axes, links, marks);
  return h("div", {}, wide("Runs", plotted), legend(report));
}

function mark(letter, x, y, text) {
  const shape = letter === "A"
    ? s("circle", { class: "a", cx: x, cy: y, r: 5 })
    : s("rect", { class: "b", x: x - 4.5, y: y - 4.5, width: 9, height: 9 });
  shape.append(s("title", {}, text));
  return shape;
}

function legend(report) {
  return h("p", { class: "legend" }, report.arms.map((side) => [arm(side), " "]));
}

function frame(values, count, unit, below) {
  const left = 70, right = 14, top = 10, bottom = 40, height = 280;
  const least = Math.min(...values), most = Math.max(...values);
  const room = (most - least) * 0.08 || Math.abs(most) * 0.05 || 1;
  const low = least - room, high = most + room;
  const x = (k) => left + (k / count) * (width - left - right);
  const y = (v) => top + (1 - (v - low) / (high - low)) * (height - top - bottom);
  const axes = rounds(low, high, 6).map((t) => s("g", {},
    s("line", { class: "grid", x1: left, x2: width - right, y1: y(t), y2: y(t) }),
    s("text", { x: left - 8, y: y(t) + 4, "text-anchor": "end" }, short(t))));
  axes.push(s("text", { class: "axis", x: (left + width) / 2, y: height - 6, "text-anchor": "middle" }, below));
  axes.push(s("text", { class: "axis", x: 4, y: top + 8 }, unit));
  return { x, y, axes, box: `0 0 ${width} ${height}` };
}

// ---- the requests of all runs

function distributions(report) {
  const there = Object.keys(FIGURES).filter((name) => report.requests[name] && report.requests[name].A.n && report.requests[name].B.n);
  if (!there.length) return null;
  return chooser("Requests of all runs", "Figure", there.map((name) => [name, FIGURES[name]]), (name) => spread(report, name));
}

function spread(report, name) {
  const { A, B, paired } = report.requests[name];
  const left = 70, right = 14, top = 10, bottom = 40, height = 280;
  // Up to the 99th of 100: the worst sample of all would squeeze the rest.
  const low = Math.min(A.quantiles[0], B.quantiles[0]);
  const high = Math.max(A.quantiles[99], B.quantiles[99], low + 1e-6);
  const x = (v) => left + ((Math.min(high, v) - low) / (high - low)) * (width - left - right);
  const y = (share) => top + (1 - share) * (height - top - bottom);
  const path = (q) => q.slice(0, 100).map((v, k) => `${k ? "L" : "M"}${x(v).toFixed(1)} ${y(k / 100).toFixed(1)}`).join("");
  const axes = [0, 0.25, 0.5, 0.75, 0.9, 0.99].map((t) => s("g", {},
    s("line", { class: "grid", x1: left, x2: width - right, y1: y(t), y2: y(t) }),
    s("text", { x: left - 8, y: y(t) + 4, "text-anchor": "end" }, t === 0.99 ? "" : `${t * 100} %`)));
  rounds(low, high, 8).forEach((t) => axes.push(s("text", { x: x(t), y: height - bottom + 16, "text-anchor": "middle" }, short(t))));
  axes.push(s("text", { class: "axis", x: (left + width) / 2, y: height - 6, "text-anchor": "middle" }, "ms, up to the 99th percentile"));
  const label = `${FIGURES[name]}, share of requests below a time. Median A ${figure(A.quantiles[50])} ms, B ${figure(B.quantiles[50])} ms`;
  return h("div", {},
    wide("Requests", s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, axes,
      s("path", { class: "curve a", d: path(A.quantiles) }), s("path", { class: "curve b", d: path(B.quantiles) }))),
    legend(report), wide("Percentiles", quantileTable(A, B)), h("p", {}, pairedText(paired)));
}

function quantileTable(A, B) {
  const shown = [[50, "median"], [90, "P90"], [99, "P99"], [100, "largest"]];
  const line = (letter, side) => h("tr", {}, h("th", { scope: "row" }, letter), h("td", {}, String(side.n)),
    shown.map(([k]) => h("td", {}, figure(side.quantiles[k]))));
  return h("table", { class: "small" },
    h("caption", {}, "All requests of all runs together, ms"),
    h("thead", {}, h("tr", {}, ["Arm", "samples", ...shown.map(([, text]) => text)].map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", {}, line("A", A), line("B", B)));
}

function pairedText(paired) {
  if (!paired) return "";
  return `The same prompt in both arms, ${paired.n} pairs: B minus A is ${figure(paired.median)} ms at the median, ` +
    `${figure(paired.p10)} to ${figure(paired.p90)} ms from the 10th to the 90th percentile; ` +
    `${(paired.lower_in_b * 100).toFixed(1)} % are faster in B. This describes; the test is over runs.`;
}

// ---- what was compared

/** What a running gapless says of itself, where it was not started here. */
function settings(side) {
  if (!side.server.settings) return "";
  return Object.entries(side.server.settings).map(([name, value]) => `${name}=${value}`).join(" ") || "defaults";
}

function sides(report) {
  const span = (range, unit = "") => range ? `${short(range[0])} … ${short(range[1])}${unit}` : "n/a";
  const rows = [
    ["Own flags", (x) => x.own_flags.join(" ") || "(none)"],
    ["All flags", (x) => x.flags.join(" ") || settings(x) || "(a server that ran already)"],
    ["Model", (x) => [x.server.id, x.server.device, x.server.dtype].filter(Boolean).join(", ") || "n/a"],
    ["Version", (x) => [x.server.owned_by, x.server.version].filter(Boolean).join(" ") || "n/a"],
    ["Start", (x) => x.server.started || "n/a"],
    ["Runs", (x) => String(x.runs)],
    ["Completed / failed", (x) => `${x.completed} / ${x.failed} (${withSpread(...x.completed_a_run)} a run)`],
    ["Prompt / output tokens", (x) => `${x.prompt_tokens} / ${x.output_tokens}`],
    ["Duration of a run", (x) => span(x.duration_s, " s")],
    ["Others' load before a run", (x) => span(x.busy_before)],
    ["Load average", (x) => span(x.load_average)],
  ];
  return section("Both sides", wide("Both sides",
    h("table", { class: "sides" },
      h("thead", {}, h("tr", {}, h("td", {}), report.arms.map((x) => h("th", { scope: "col" }, arm(x))))),
      h("tbody", {}, rows.map(([name, text]) => h("tr", {}, h("th", { scope: "row" }, name), report.arms.map((x) => h("td", {}, text(x)))))))));
}

function details(report) {
  const host = { ...report.host, memory_bytes: `${(report.host.memory_bytes / 2 ** 30).toFixed(1)} GiB` };
  return h("div", { class: "details" },
    section("Work", list({ ...report.workload, ...report.metadata })), section("Machine", list(host)),
    section("Design", list({ ...report.design, created: report.created, gapless: report.version, command: report.command.join(" ") })));
}

function list(record) {
  const text = (value) => Array.isArray(value) ? value.join(", ") || "none" : value === null ? "n/a"
    : typeof value === "object" ? JSON.stringify(value) : String(value);
  return h("dl", {}, Object.entries(record).flatMap(([name, value]) => [h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, text(value))]));
}

function notes(report) {
  const d = report.design;
  const test = { crossover: "the cross-over t test over pairs", permutation: "the sign-flip permutation test over pairs", welch: "Welch's t test" };
  return section("How to read this", h("p", {},
    `The unit is the run: requests within a run are not independent. p comes from ${test[d.test] || d.test} and is raised ` +
    `for the length of the list (Holm); ✓ and ✗ mean p < ${d.alpha}, ≈ that the difference could be noise. Intervals are for each ` +
    `metric alone. Detectable is the smallest true difference that this many runs call in ${d.power * 100} % of experiments. ` +
    "Behind the tail: how many samples lie at or beyond the percentile, in all runs and in one."));
}
