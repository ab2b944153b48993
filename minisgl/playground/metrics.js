// Reads /metrics at an interval, while the page is visible, and keeps the values of the last minutes.

import { urlOf } from "./api.js";

const MAX_AGE_MS = 5 * 60_000;
const SERIES = /^minisgl_(\w+)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:\\.|[^"\\])*)"/g;

/** The series of one scrape: of(name, labels) is the sum of the series that have these labels. */
export class Scrape {
  constructor(text, at) {
    this.at = at;
    this.series = new Map();
    for (const line of text.split("\n")) {
      const [, name, labels, value] = SERIES.exec(line) ?? [];
      if (name && !name.endsWith("_bucket")) {
        const found = { labels: readLabels(labels ?? ""), value: Number(value) };
        this.series.set(name, [...(this.series.get(name) ?? []), found]);
      }
    }
  }

  of(name, labels = {}) {
    const wanted = Object.entries(labels);
    return (this.series.get(name) ?? [])
      .filter((one) => wanted.every(([label, value]) => one.labels[label] === value))
      .reduce((sum, one) => sum + one.value, 0);
  }

  /** The labels of the first series of a name. */
  first(name) {
    return this.series.get(name)?.[0]?.labels ?? {};
  }
}

const readLabels = (text) => Object.fromEntries([...text.matchAll(LABEL)].map(([, name, value]) => [name, value]));

/** The state of the server. scrape: the last one; null if it failed. A server drains after SIGTERM. */
export function stateOf(scrape) {
  if (scrape === null) {
    return "unknown";
  }
  if (scrape.of("draining")) {
    return "draining";
  }
  if (scrape.of("ready")) {
    return "ready";
  }
  return scrape.of("startup_seconds", { phase: "total" }) ? "not ready" : "loading";
}

/** The scrapes of the last minutes. `changed` is called after each with the scrape or null. */
export class Poller {
  constructor(intervalMs, changed) {
    this.intervalMs = intervalMs;
    this.changed = changed;
    this.history = [];
    this.timer = 0;
    document.addEventListener("visibilitychange", () => this.#next(0));
    this.#next(0);
  }

  /** Change the interval; the next scrape is due at once. */
  every(intervalMs) {
    this.intervalMs = intervalMs;
    this.#next(0);
  }

  #next(delayMs) {
    clearTimeout(this.timer);
    if (document.visibilityState === "visible") {
      this.timer = setTimeout(() => this.#scrape(), delayMs);
    }
  }

  async #scrape() {
    let found = null;
    try {
      const response = await fetch(urlOf("metrics"), { cache: "no-store" });
      found = response.ok ? new Scrape(await response.text(), Date.now()) : null;
    } catch (error) {
      if (!(error instanceof TypeError)) {
        throw error;
      }
    }
    if (found !== null) {
      this.history = [...this.history.filter((one) => one.at > found.at - MAX_AGE_MS), found];
    }
    this.#next(this.intervalMs);
    this.changed(found);
  }
}
