// SPDX-License-Identifier: Apache-2.0
// Prometheus text to numbers: one scrape (Sample), and what two scrapes say about the time between them.

const PREFIX = "whalefall:";
const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** One scrape. Series that differ only in other labels (several engines) are added up. */
export class Sample {
  constructor(text, time_s) {
    this.time_s = time_s;
    this.series = new Map(); // name -> [{labels, value}]
    for (const line of text.split("\n")) {
      const found = line.startsWith(PREFIX) ? LINE.exec(line) : null;
      if (!found) continue;
      const name = found[1].slice(PREFIX.length);
      if (!this.series.has(name)) this.series.set(name, []);
      this.series.get(name).push({ labels: labelsOf(found[2] ?? ""), value: Number(found[3].replace("Inf", "Infinity")) });
    }
  }

  get isEmpty() {
    return this.series.size === 0;
  }

  /** Sum over all series of this name that have these labels; null where the server has none: the feature is absent. */
  value(name, where = {}) {
    const chosen = (this.series.get(name) ?? []).filter(({ labels }) => Object.entries(where).every(([key, value]) => labels[key] === value));
    return chosen.length ? chosen.reduce((sum, { value }) => sum + value, 0) : null;
  }

  labelValues(name, label) {
    return [...new Set((this.series.get(name) ?? []).map(({ labels }) => labels[label]))];
  }

  /** {bounds, counts, sum, count}; counts are cumulative, the last bound is Infinity. */
  histogram(name) {
    const bounds = this.labelValues(`${name}_bucket`, "le").map((le) => [Number(le.replace("+Inf", "Infinity")), le]).sort((a, b) => a[0] - b[0]);
    if (bounds.length === 0) return null;
    return {
      bounds: bounds.map(([bound]) => bound),
      counts: bounds.map(([, le]) => this.value(`${name}_bucket`, { le })),
      sum: this.value(`${name}_sum`),
      count: this.value(`${name}_count`),
    };
  }
}

function labelsOf(text) {
  const labels = {};
  for (const [, name, value] of text.matchAll(LABEL)) labels[name] = value.replaceAll(/\\(.)/g, (_, letter) => (letter === "n" ? "\n" : letter));
  return labels;
}

/** How much a counter rose; null when one of the two lacks it, or when it fell: the server has started again. */
export function rise(before, after, name, where) {
  const [old, now] = [before.value(name, where), after.value(name, where)];
  return old === null || now === null || now < old ? null : now - old;
}

/** Per second. */
export function rate(before, after, name, where) {
  const risen = rise(before, after, name, where);
  const elapsed_s = after.time_s - before.time_s;
  return risen === null || elapsed_s <= 0 ? null : risen / elapsed_s;
}

/** What a histogram gained between two scrapes. */
export function histogramRise(before, after, name) {
  const [old, now] = [before.histogram(name), after.histogram(name)];
  if (!old || !now || now.count < old.count || now.bounds.length !== old.bounds.length) return null;
  return { bounds: now.bounds, counts: now.counts.map((count, i) => count - old.counts[i]), sum: now.sum - old.sum, count: now.count - old.count };
}

/**
 * The q-quantile as {value, is_bound}, inside its bucket by straight line, as Prometheus does; null without observations.
 * In the lowest bucket that would be a guess, and above the highest there is none: then the value is the bound and is_bound says on which side.
 */
export function quantile(histogram, q) {
  if (!histogram || histogram.count === 0) return null;
  const { bounds, counts } = histogram;
  const rank = q * histogram.count;
  const i = counts.findIndex((count) => count >= rank && count > 0);
  if (bounds[i] === Infinity) return { value: bounds[i - 1], is_bound: "above" };
  if (i === 0) return { value: bounds[0], is_bound: "below" };
  const below = counts[i - 1];
  return { value: bounds[i - 1] + ((bounds[i] - bounds[i - 1]) * (rank - below)) / (counts[i] - below), is_bound: "" };
}

export const mean = (histogram) => (histogram?.count ? histogram.sum / histogram.count : null);
