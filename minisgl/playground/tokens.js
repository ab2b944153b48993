// Completes a text, and colours each token by its probability. The alternatives of a token are
// shown under the pointer, or for the token that has the focus.

import { call, events } from "./api.js";
import { announce, button, byId, el, notify } from "./dom.js";
import { showRequest } from "./request.js";

const PATH = "v1/completions";
// The lower bounds of the classes p0 to p4; less likely tokens have the class p5.
const BOUNDS = [0.9, 0.7, 0.5, 0.3, 0.1];
const percent = (logprob) => {
  const value = Math.exp(logprob) * 100;
  return `${value >= 99.95 ? "100" : value >= 0.1 ? value.toFixed(1) : "<0.1"} %`;
};

/** A token as text. Newlines and tabs have a visible sign. */
export function shown(token) {
  const bytes = token.replace(/^bytes:/, "").replaceAll("\\x", "");
  return token.startsWith("bytes:\\x") ? `<${bytes}>` : token.replaceAll("\n", "\u21b5\n").replaceAll("\t", "\u21e5\t");
}

/** The form and the result of a completion. model: returns the name of the selected model. */
export class Tokens {
  constructor(model) {
    this.model = model;
    this.stop = null;
    this.result = byId("tokens-result");
    this.card = byId("alternatives");
    byId("complete").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#complete();
    });
    byId("tokens-stop").addEventListener("click", () => this.stop?.abort());
    this.result.addEventListener("pointerover", (event) => this.#show(event.target));
    this.result.addEventListener("pointerleave", () => this.#hide());
    this.result.addEventListener("focusin", (event) => this.#show(event.target));
    this.result.addEventListener("focusout", () => this.#hide());
    this.result.addEventListener("keydown", (event) => this.#move(event));
    byId("tokens").addEventListener("scroll", () => this.#hide());
    byId("tokens-request").append(button("Request", () => showRequest(PATH, this.#body()), "Show the request"));
  }

  #body() {
    const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
    return {
      model: this.model(),
      prompt: byId("tokens-prompt").value,
      max_tokens: number("tokens-max"),
      temperature: number("tokens-temperature"),
      logprobs: number("tokens-top") ?? 5,
      echo: byId("tokens-echo").checked,
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  showDefaults(defaults) {
    byId("tokens-temperature").placeholder = String(defaults?.temperature ?? "");
  }

  async #complete() {
    if (this.stop !== null) {
      return;
    }
    notify("");
    const body = this.#body();
    this.stop = new AbortController();
    this.#showBusy(true);
    this.tokens = [];
    this.result.replaceChildren();
    byId("tokens-facts").textContent = "";
    try {
      const response = await call(PATH, { body, signal: this.stop.signal });
      for await (const { choices, usage } of events(response)) {
        if (choices[0]?.logprobs) {
          this.#add(choices[0].logprobs);
        }
        if (usage) {
          this.#sum(usage);
        }
      }
    } catch (error) {
      if (error.name !== "AbortError") {
        notify(error.message);
      }
    } finally {
      this.stop = null;
      this.#showBusy(false);
    }
    announce(`Completion done. ${this.tokens.length} tokens.`);
  }

  #showBusy(isBusy) {
    byId("tokens-run").disabled = isBusy;
    byId("tokens-stop").hidden = !isBusy;
  }

  #add(logprobs) {
    const added = logprobs.tokens.map((token, at) => {
      const logprob = logprobs.token_logprobs[at];
      const others = Object.entries(logprobs.top_logprobs[at] ?? {}).sort((a, b) => b[1] - a[1]);
      const found = { token, logprob, others };
      const index = this.tokens.push(found) - 1;
      const level = logprob === null ? "first" : `p${rank(Math.exp(logprob))}`;
      const isTop = logprob === null || others.length === 0 || others[0][1] <= logprob;
      const text = logprob === null ? "no probability" : percent(logprob);
      return el(
        "span",
        {
          class: `token ${level}${isTop ? "" : " unlikely"}`,
          role: "option",
          "aria-label": `${JSON.stringify(shown(token))}, ${text}`,
          tabindex: index === 0 ? "0" : "-1",
          "aria-describedby": "alternatives",
          "data-index": String(index),
        },
        shown(token),
      );
    });
    this.result.append(...added);
  }

  #sum(usage) {
    const known = this.tokens.filter((one) => one.logprob !== null);
    const mean = known.reduce((sum, one) => sum + one.logprob, 0) / known.length;
    const facts = [`${usage.prompt_tokens} prompt tokens`, `${usage.completion_tokens} output tokens`];
    if (known.length) {
      facts.push(`perplexity ${Math.exp(-mean).toFixed(2)}`);
    }
    byId("tokens-facts").textContent = facts.join(" \u00b7 ");
  }

  /** Arrow keys move the focus from token to token. */
  #move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (event.key === "Escape") {
      this.#hide();
    } else if (step && event.target.dataset.index) {
      event.preventDefault();
      const last = this.tokens.length - 1;
      const next = Math.min(Math.max(Number(event.target.dataset.index) + step, 0), last);
      event.target.tabIndex = -1;
      const node = this.result.children[next];
      node.tabIndex = 0;
      node.focus();
    }
  }

  #show(target) {
    const found = this.tokens?.[target.dataset.index];
    if (!found) {
      this.#hide();
      return;
    }
    const rows = found.others.map(([token, logprob]) =>
      el(
        "tr",
        token === found.token ? { class: "chosen" } : {},
        el("td", {}, el("code", {}, shown(token))),
        el("td", {}, percent(logprob)),
        el("td", {}, el("meter", { min: "0", max: "1", value: Math.exp(logprob), "aria-hidden": "true" })),
      ),
    );
    const head = found.logprob === null ? "first token" : percent(found.logprob);
    this.card.replaceChildren(el("p", {}, el("code", {}, shown(found.token)), ` ${head}`), el("table", {}, el("tbody", {}, rows)));
    this.card.hidden = false;
    const [box, size] = [target.getBoundingClientRect(), this.card.getBoundingClientRect()];
    const below = box.bottom + size.height + 12 < innerHeight;
    this.card.style.left = `${Math.max(8, Math.min(box.left, innerWidth - size.width - 8))}px`;
    this.card.style.top = `${below ? box.bottom + 6 : Math.max(8, box.top - size.height - 6)}px`;
  }

  #hide() {
    this.card.hidden = true;
  }
}

const rank = (probability) => {
  const found = BOUNDS.findIndex((bound) => probability >= bound);
  return found < 0 ? BOUNDS.length : found;
};
