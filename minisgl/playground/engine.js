// The live view of the engine. Gauges are shown as they are. Counters become rates between two
// scrapes, so a plot has a gap where no forward pass ran.

import { byId, el } from "./dom.js";
import { stateOf } from "./metrics.js";
import { Plot } from "./plot.js";

const PHASES = ["prefill", "mixed", "decode"];
const STATES = {
  loading: "The server loads the model. It refuses requests until it is ready.",
  draining: "The server drains: it finishes the open requests and then ends. It refuses new requests.",
  "not ready": "The server runs, but it is not ready: /readyz answers 503.",
  unknown: "The page cannot read /metrics: the server does not answer, or a proxy does not pass this path on.",
};

const number = (value) => (value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toPrecision(2));
const share = (value) => `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
const milliseconds = (value) => `${value >= 100 ? Math.round(value) : value.toPrecision(2)} ms`;

/** The growth of `top` from scrape a to b, divided by that of `bottom`; null if `bottom` did not grow. */
const ratio = (a, b, top, bottom) => {
  const grown = bottom(b) - bottom(a);
  return grown > 0 ? (top(b) - top(a)) / grown : null;
};
const kv = (scrape, state) => {
  const all = scrape.of("kv_cache_tokens");
  return all ? scrape.of("kv_cache_tokens", { state }) / all : 0;
};
const perPass = (phase, name, bottom) => (a, b) =>
  ratio(a, b, (one) => one.of(name, { phase }), (one) => one.of(bottom, { phase }));
const perSecond = (name) => (a, b) => Math.max(0, b.of(name) - a.of(name)) / ((b.at - a.at) / 1000);

const inMs = (seconds) => (a, b) => {
  const found = seconds(a, b);
  return found === null ? null : found * 1000;
};
const mean = (name) => inMs((a, b) => ratio(a, b, (one) => one.of(`${name}_sum`), (one) => one.of(`${name}_count`)));

// [title, note, format, smallest height of the scale, lines]. A line is a name and its value from two
// neighbouring scrapes.
const PLOTS = [
  ["Requests", "in the batch, or waiting for it", number, 1, [
    ["running", (_, b) => b.of("requests_running")],
    ["waiting", (_, b) => b.of("requests_waiting")],
  ]],
  ["Output", "tokens per second", number, 10, [["output", perSecond("generation_tokens_total")]]],
  ["Input", "prompt tokens per second", number, 10, [["prompt", perSecond("prompt_tokens_total")]]],
  ["Batch size", "requests in a forward pass, mean", number, 1,
    PHASES.map((phase) => [phase, perPass(phase, "batch_size_sum", "batch_size_count")])],
  ["Step time", "one forward pass, mean", milliseconds, 0.001, PHASES.map((phase) => {
    const seconds = perPass(phase, "forward_seconds_total", "forward_passes_total");
    return [phase, inMs(seconds)];
  })],
  ["KV cache", "share of its tokens", share, 1, [
    ["in use", (_, b) => kv(b, "used")],
    ["cached", (_, b) => kv(b, "evictable")],
  ]],
  ["Prefix cache hits", "share of the prompt tokens", share, 1, [
    ["hits", (a, b) => ratio(a, b, (one) => one.of("prefix_cache_hit_tokens_total"), (one) => one.of("prefix_cache_query_tokens_total"))],
  ]],
  ["Time to first token", "mean of the requests", milliseconds, 1, [["arrival to output", mean("time_to_first_token_seconds")]]],
  ["Time between outputs", "mean of the requests", milliseconds, 1, [["output to output", mean("inter_token_latency_seconds")]]],
];

/** The view "Engine". */
export class Engine {
  constructor() {
    this.plots = PLOTS.map(([title, note, format]) => new Plot(title, note, format));
    byId("plots").append(...this.plots.map((plot) => plot.node));
  }

  /** history: the scrapes of the last minutes. newest: the last scrape; null if it failed. */
  draw(history, newest) {
    const state = stateOf(newest);
    byId("engine-state").textContent = STATES[state] ?? "";
    byId("engine-state").hidden = !(state in STATES);
    const last = history.at(-1);
    if (!last) {
      return;
    }
    PLOTS.forEach(([, , , least, lines], at) => {
      const drawn = lines.map(([name, value]) => [name, history.slice(1).map((b, i) => [b.at, value(history[i], b)])]);
      this.plots[at].draw(drawn, Date.now(), least);
    });
    byId("engine-facts").replaceChildren(...facts(last).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }
}

function facts(scrape) {
  const [model, build] = [scrape.first("model_info"), scrape.first("build_info")];
  const start = scrape.of("startup_seconds", { phase: "total" });
  const pages = scrape.of("kv_cache_pages");
  return [
    ["model", model.model_name ?? "\u2013"],
    ["device", [model.device, model.dtype, model.tp_size > 1 && `${model.tp_size} ranks`].filter(Boolean).join(", ") || "\u2013"],
    ["KV cache", `${pages.toLocaleString("en")} pages of ${scrape.of("kv_cache_page_size_tokens")} tokens`],
    ["requests ended", scrape.of("requests_total").toLocaleString("en")],
    ["preemptions", scrape.of("preemptions_total").toLocaleString("en")],
    ["start", start ? `${start.toFixed(1)} s` : "not complete"],
    ["version", `${build.version ?? "\u2013"} ${(build.commit ?? "").slice(0, 7)}`],
  ];
}
