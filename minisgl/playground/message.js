// Shows one message of a conversation, and its buttons.

import { thumbnail } from "./attachments.js";
import { button, copyButton, el } from "./dom.js";
import { Markdown } from "./markdown.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool result" };

/**
 * A message on the page. `actions` has the functions that its buttons call: edit(text), regenerate()
 * and showRequest(). `update` shows the text that a stream has added.
 */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.body = el("div", { class: "body" });
    this.foot = el("footer");
    this.node = el(
      "article",
      { class: `message ${message.role}`, "aria-label": NAMES[message.role] },
      el("h2", {}, NAMES[message.role]),
      this.body,
      this.foot,
    );
    if (message.role === "assistant") {
      this.#buildAnswer();
    } else {
      this.#showText();
    }
  }

  #showText() {
    const { role, content, files = [] } = this.message;
    const attached = files.map((file) =>
      file.image
        ? thumbnail(file)
        : el("details", { class: "file" }, el("summary", {}, file.name), el("pre", {}, file.text)),
    );
    this.body.replaceChildren(...(content ? [el("p", { class: "plain" }, content)] : []), ...attached);
    const edit = role === "user" && button("Edit", () => this.#edit());
    this.node.classList.remove("editing");
    this.foot.replaceChildren(...[edit, copyButton("Copy", () => content)].filter(Boolean));
  }

  #edit() {
    const area = el("textarea", { "aria-label": "Your message", rows: "3", value: this.message.content });
    const cancel = () => {
      this.#showText();
      this.foot.querySelector("button").focus();
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        cancel();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.actions.edit(area.value);
      }
    });
    this.node.classList.add("editing");
    this.body.replaceChildren(area);
    const send = button("Send", () => this.actions.edit(area.value));
    this.foot.replaceChildren(send, button("Cancel", cancel));
    area.focus();
  }

  #buildAnswer() {
    this.thinking = el("pre", { class: "plain" });
    this.thinkingTitle = el("summary", {}, "Reasoning");
    this.reasoning = el("details", { class: "reasoning" }, this.thinkingTitle, this.thinking);
    this.markdown = new Markdown();
    this.calls = el("div", { class: "calls" });
    this.status = el("p", { class: "status" });
    this.body.append(this.reasoning, this.markdown.node, this.calls, this.status);
    this.stats = el("span", { class: "stats" });
    const { regenerate, showRequest } = this.actions;
    this.buttons = el(
      "span",
      { class: "buttons" },
      copyButton("Copy", () => this.message.content),
      button("Regenerate", () => regenerate()),
      button("Request", () => showRequest(), "Show the request as curl, Python or JSON"),
    );
    this.foot.append(this.stats, this.buttons);
    this.update(false);
  }

  /** isOpen: the answer is not complete. */
  update(isOpen) {
    const { content, reasoning, calls, finish, error } = this.message;
    this.reasoning.hidden = !reasoning;
    if (this.thinking.textContent !== reasoning) {
      this.thinking.textContent = reasoning;
    }
    this.thinkingTitle.textContent = isOpen && !content ? "Reasoning, not complete" : "Reasoning";
    this.markdown.show(content);
    this.calls.replaceChildren(...calls.map(showCall));
    const waits = isOpen && !content && !reasoning && !calls.length;
    this.status.textContent = error || (waits ? "Waiting for the first token" : ENDS[finish] ?? "");
    this.status.classList.toggle("error", Boolean(error));
    this.status.hidden = this.status.textContent === "";
    this.buttons.hidden = isOpen;
    this.stats.replaceChildren(...describe(this.message.stats));
  }
}

const ENDS = {
  length: "The answer ended at the limit of tokens.",
  stopped: "You stopped this answer.",
};

function showCall(call) {
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch {
    // The model may write arguments that are not JSON. During a stream they are incomplete.
  }
  return el("div", { class: "code" }, el("div", { class: "code-head" }, `calls ${call.name}`), el("pre", {}, shown));
}

/** The figures of an answer as elements, each with its meaning as a title. */
function describe(stats) {
  const figures = [
    [stats.firstMs, (ms) => `${Math.round(ms)} ms`, "first token", "Time from sending to the first text"],
    [stats.perSecond, (rate) => rate.toFixed(1), "tokens/s", "Output tokens per second after the first"],
    [stats.prompt, String, "prompt", "Tokens of the prompt"],
    [stats.cached, String, "cached", "Prompt tokens found in the prefix cache"],
    [stats.output, String, "output", "Tokens of the answer, with its reasoning"],
  ];
  return figures
    .filter(([value]) => typeof value === "number")
    .map(([value, format, unit, title]) => el("span", { title }, el("b", {}, format(value)), ` ${unit}`));
}
