// SPDX-License-Identifier: Apache-2.0
// The dashboard: reads /metrics every second and draws what changed. Cards are a table of what is shown; nothing else knows a metric's name.

import { Chart } from "./chart.js";
import { Sample, histogramRise, mean, quantile, rate, rise } from "./metrics.js";

const EVERY_MS = 1000;
const RATE_S = 5; // rates are of this time, so that one busy second does not make the number jump
const WINDOW_S = 60; // percentiles and shares are of this time
const KEPT_S = 900;
const OFF = "off"; // the server has no such number: the feature is absent

const at = (id) => document.getElementById(id);
let samples = []; // of the last WINDOW_S
let timer = 0;

// --- what is shown ---

const whole = (value) => Math.round(value).toLocaleString("en");
const short = (value) => (value >= 1000 ? value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 }) : trim(value));
const trim = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });
const share = (value) => `${(value * 100).toLocaleString("en", { maximumSignificantDigits: value < 0.1 ? 2 : 3 })}%`;
const duration = (seconds) => (seconds === 0 ? "0" : seconds < 1 ? `${trim(seconds * 1000)} ms` : `${trim(seconds)} s`);

/** A number's description: read({now, recent, window}) gives a number, null (nothing to tell yet) or OFF. */
const gauge = (name) => ({ now }) => now.value(name) ?? OFF;
const perSecond = (name) => ({ now, recent }) => (now.value(name) === null ? OFF : recent && rate(recent, now, name));
const percentile = (name, q) => ({ now, window }) => (now.histogram(name) === null ? OFF : window && quantile(histogramRise(window, now, name), q));
const ratio = (part, all) => ({ now, window }) => {
  if (now.value(part) === null || now.value(all) === null) return OFF;
  const total = window && rise(window, now, all);
  return total ? rise(window, now, part) / total : null;
};

const blocks = (tier) => ({ now }) => {
  const [used, free] = ["used", "free"].map((kind) => now.value("kv_blocks", { tier, state: kind }));
  return used === null || used + free === 0 ? OFF : used / (used + free);
};

const percentiles = (name) => [50, 90, 99].map((p) => ({ name: `p${p}`, read: percentile(name, p / 100), format: duration }));

const CARDS = [
  { title: "Requests", about: "in the batch, or waiting for a place in it", format: short, numbers: [
    { name: "running", read: gauge("num_requests_running"), format: whole },
    { name: "waiting", read: gauge("num_requests_waiting"), format: whole },
  ] },
  { title: "Generated tokens per second", about: "delivered to readers", format: short, numbers: [{ name: "generation", read: perSecond("generation_tokens_total"), format: short }] },
  { title: "Prompt tokens per second", about: "of prompts that began to give output", format: short, numbers: [{ name: "prompts", read: perSecond("prompt_tokens_total"), format: short }] },
  { title: "Time to first token", about: "from arrival, at the door", format: duration, numbers: percentiles("time_to_first_token_seconds") },
  { title: "Time between tokens", about: "of one answer", format: duration, numbers: percentiles("inter_token_latency_seconds") },
  { title: "KV blocks in use", about: "share of the tier's blocks", format: share, max: 1, numbers: [
    { name: "device", read: blocks("device"), format: share },
    { name: "host", read: blocks("host"), format: share },
    { name: "disk", read: blocks("disk"), format: share },
  ] },
  { title: "Prefix cache hits", about: "share of prompt tokens taken from the cache", format: share, max: 1, numbers: [
    { name: "hits", read: ratio("prompt_tokens_cached_total", "prompt_tokens_total"), format: share },
  ] },
  { title: "Drafts accepted", about: "share of speculated tokens that were kept", format: share, max: 1, numbers: [
    { name: "acceptance", read: ratio("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"), format: share },
  ] },
];

const blockCount = (tier) => ({ now }) => {
  const [used, free] = ["used", "free"].map((kind) => now.value("kv_blocks", { tier, state: kind }));
  return used === null ? OFF : `${whole(used)} of ${whole(used + free)}`;
};
const ended = (reason) => ({ now }) => now.value("request_success_total", { finished_reason: reason }) ?? OFF;
const average = (name) => ({ now, window }) => (now.histogram(name) === null ? OFF : window && mean(histogramRise(window, now, name)));

/** Rows of the table that have no card: [name, read, format, meaning]. */
const ROWS = [
  ["Time to first token: mean", average("time_to_first_token_seconds"), duration, "from arrival, at the door"],
  ["Time between tokens: mean", average("inter_token_latency_seconds"), duration, "of one answer"],
  ["Queue time: mean", average("request_queue_time_seconds"), duration, "arrival to first scheduled"],
  ["KV blocks, device", blockCount("device"), String, "blocks in use on the device"],
  ["KV blocks, host", blockCount("host"), String, "blocks in use in host memory"],
  ["KV blocks, disk", blockCount("disk"), String, "blocks in use on disk"],
  ["State slots", gauge("state_slots_used"), whole, "requests that hold window rings"],
  ["Requests", gauge("requests_total"), whole, "accepted since start"],
  ["Ended: stop", ended("stop"), whole, "answers that came to their end"],
  ["Ended: length", ended("length"), whole, "answers that reached their token limit"],
  ["Ended: abort", ended("abort"), whole, "answers whose reader left, or ended by the server"],
  ["Ended: error", ended("error"), whole, "answers ended by a fault"],
  ["Prompt tokens", gauge("prompt_tokens_total"), whole, "of requests that gave output"],
  ["Cached prompt tokens", gauge("prompt_tokens_cached_total"), whole, "those of them from the prefix cache"],
  ["Generated tokens", gauge("generation_tokens_total"), whole, "delivered"],
  ["Preemptions", gauge("num_preemptions_total"), whole, "requests put back for want of blocks"],
  ["Engine restarts", gauge("engine_restarts_total"), whole, "times the engine process was started again"],
  ["Steps", gauge("engine_steps_total"), whole, "forwards the engine has run"],
  ["Rows per step", ({ now, recent }) => recent && quotient(rate(recent, now, "batched_tokens_total"), rate(recent, now, "engine_steps_total")), trim, "tokens in one forward, prompts and outputs together"],
];

const quotient = (a, b) => (a === null || !b ? null : a / b);

// --- drawing ---

/** A reading as text: a number, a bound, "–" for nothing yet, "off" for an absent feature. */
function written(reading, format) {
  if (reading === OFF) return OFF;
  if (reading === null || reading === undefined) return "–";
  if (typeof reading !== "object") return format(reading);
  return `${{ below: "< ", above: "> ", "": "" }[reading.is_bound]}${format(reading.value)}`;
}

const numeric = (reading) => (typeof reading === "number" ? reading : reading?.value ?? null);

const SERIES = ["first", "second", "third"];

class Card {
  constructor({ title, about, format, max, numbers }) {
    this.numbers = numbers;
    this.points = [];
    const place = make("div", "plot");
    const now = make("div", "now");
    this.values = numbers.map(({ name }, i) => {
      const value = make("span", "value", "–");
      const label = make("span", "name");
      label.append(make("i", SERIES[i]), name);
      const pair = make("div");
      pair.append(value, label);
      now.append(pair);
      return value;
    });
    this.element = make("article", "card");
    this.element.append(make("h2", "", title), now, place);
    this.chart = new Chart(place, { lines: numbers.map(({ name }, i) => ({ name, className: SERIES[i] })), format, max });
    this.rows = numbers.map(({ name }) => row(numbers.length > 1 ? `${title}: ${name}` : title, about));
  }

  take(context) {
    const readings = this.numbers.map(({ read }) => read(context));
    readings.forEach((reading, i) => {
      const text = written(reading, this.numbers[i].format);
      this.values[i].textContent = text;
      this.values[i].classList.toggle("off", text === OFF);
      this.rows[i].value.textContent = text;
    });
    const { time_s } = context.now;
    this.points = [...this.points.filter((point) => point.time_s > time_s - KEPT_S), { time_s, values: readings.map(numeric) }];
    this.draw();
  }

  draw() {
    const span_s = Number(at("span").value);
    const now_s = this.points.at(-1)?.time_s ?? 0;
    this.chart.draw(this.points.filter(({ time_s }) => time_s >= now_s - span_s), now_s, span_s);
  }
}

function row(name, meaning) {
  const line = make("tr");
  const head = make("th", "", name);
  head.scope = "row";
  const value = make("td", "", "–");
  line.append(head, value, make("td", "", meaning));
  at("numbers").tBodies[0].append(line);
  return { value };
}

function make(name, className = "", text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

const cards = CARDS.map((description) => new Card(description));
const rows = ROWS.map(([name, read, format, meaning]) => ({ read, format, ...row(name, meaning) }));
at("cards").append(...cards.map((card) => card.element));

// --- reading ---

async function poll() {
  clearTimeout(timer);
  try {
    const response = await fetch("metrics", { headers: { Accept: "text/plain" }, cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (!response.ok) throw new Error(`status ${response.status}`);
    take(new Sample(await response.text(), performance.now() / 1000));
  } catch (error) {
    health(error instanceof TypeError || error.name === "TimeoutError" ? "server not reachable, trying again" : `no numbers: ${error.message}`, true);
  }
  if (at("pause").ariaPressed !== "true") timer = setTimeout(poll, EVERY_MS);
}

function take(now) {
  if (now.isEmpty) return health("the model is loading", false);
  const last = samples.at(-1);
  if (last && rise(last, now, "engine_steps_total") === null) samples = []; // the server has started again
  samples = [...samples.filter(({ time_s }) => time_s >= now.time_s - WINDOW_S - 1), now];
  const since = (span_s) => samples.find((sample) => sample !== now && sample.time_s >= now.time_s - span_s - 0.5) ?? null;
  const context = { now, recent: since(RATE_S), window: since(WINDOW_S) };
  for (const card of cards) card.take(context);
  for (const { read, format, value } of rows) value.textContent = written(read(context), format);
  at("model").textContent = now.labelValues("num_requests_running", "model_name").join(", ");
  health("live", false);
}

function health(text, is_bad) {
  at("health").classList.toggle("bad", is_bad);
  if (at("health").textContent !== text) at("health").textContent = text;
}

at("span").addEventListener("change", () => cards.forEach((card) => card.draw()));
at("pause").addEventListener("click", () => {
  const is_paused = at("pause").ariaPressed !== "true";
  at("pause").ariaPressed = String(is_paused);
  at("pause").textContent = is_paused ? "Go on" : "Pause";
  if (is_paused) {
    clearTimeout(timer);
    health("paused", false);
  } else poll();
});
poll();
