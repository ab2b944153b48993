// The chat: the list of conversations, the messages of one of them, and the stream of an answer.

import { ApiError, call, events } from "./api.js";
import { Attachments } from "./attachments.js";
import {
  apiMessages,
  deleteConversation,
  emptyConversation,
  loadConversations,
  saveConversation,
  titleOf,
} from "./conversations.js";
import { announce, button, byId, el, notify } from "./dom.js";
import { MessageView } from "./message.js";
import { showRequest } from "./request.js";

const MIN_SPAN_MS = 50;
const PATH = "v1/chat/completions";

/** The view "Chat". model: returns the name of the selected model. */
export class Chat {
  constructor(parameters, model) {
    this.parameters = parameters;
    this.model = model;
    this.conversations = loadConversations();
    this.deleted = new Set(); // an answer to one of these may end later
    this.attachments = new Attachments();
    this.stop = null;
    this.list = byId("messages");
    this.input = byId("prompt");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#sendInput();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#sendInput();
      }
    });
    byId("chat").addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        this.stop?.abort();
      }
    });
    byId("stop").addEventListener("click", () => this.stop?.abort());
    byId("new").addEventListener("click", () => {
      this.#select(emptyConversation(this.open.system));
      this.input.focus();
    });
    byId("system").addEventListener("change", () => {
      this.open.system = byId("system").value;
      this.#save();
    });
    addEventListener("storage", () => this.#reload());
    this.#select(this.conversations[0] ?? emptyConversation());
  }

  /** Read the stored conversations again. The open conversation keeps its state in this tab. */
  #reload() {
    const others = loadConversations().filter((one) => one.id !== this.open.id);
    this.conversations = [...(this.open.messages.length ? [this.open] : []), ...others];
    this.#list();
  }

  #select(conversation) {
    this.stop?.abort();
    this.open = conversation;
    byId("system").value = conversation.system;
    this.#render();
    this.#list();
    if (document.body.classList.contains("shows-conversations") && matchMedia("(max-width: 50rem)").matches) {
      byId("show-conversations").click(); // On a phone, the list covers the messages.
    }
  }

  #save() {
    if (this.open.messages.length) {
      saveConversation(this.open);
      this.#reload();
    }
  }

  #list() {
    const items = this.conversations.map((one) => {
      const title = titleOf(one);
      const current = one.id === this.open.id ? { "aria-current": "true" } : {};
      const open = el("button", { type: "button", ...current, onclick: () => this.#select(one) }, title);
      return el("li", {}, open, button("\u00d7", () => this.#delete(one), `Delete ${title}`));
    });
    byId("conversations").replaceChildren(...items);
  }

  #delete(conversation) {
    if (!confirm(`Delete the conversation "${titleOf(conversation)}"?`)) {
      return;
    }
    deleteConversation(conversation.id);
    this.deleted.add(conversation);
    this.conversations = this.conversations.filter((one) => one !== conversation);
    if (conversation === this.open) {
      this.#select(this.conversations[0] ?? emptyConversation());
    }
    this.#list();
    byId("new").focus();
  }

  #render() {
    const views = this.open.messages.map((message, at) => this.#view(message, at));
    this.list.replaceChildren(...views.map((view) => view.node));
    byId("welcome").hidden = views.length > 0;
    this.list.scrollTop = this.list.scrollHeight;
    this.#askForResults();
    return views;
  }

  #view(message, at) {
    const { messages } = this.open;
    return new MessageView(message, {
      edit: (content) => {
        if (content.trim() || message.files.length) {
          this.#answer(() => messages.splice(at, Infinity, { ...message, content }));
        }
      },
      regenerate: () => this.#answer(() => messages.splice(at)),
      showRequest: () =>
        showRequest(PATH, { ...message.parameters, messages: apiMessages(this.open, at), stream: true }),
    });
  }

  /** After an answer with tool calls: a form that takes the result of each call. */
  #askForResults() {
    const last = this.open.messages.at(-1);
    if (this.stop !== null || last?.role !== "assistant" || !last.calls.length) {
      return;
    }
    const areas = last.calls.map((one) => el("textarea", { rows: "2", "aria-label": `Result of ${one.name}` }));
    const fields = last.calls.map((one, at) => el("label", {}, `Result of ${one.name}`, areas[at]));
    const send = () => {
      const results = last.calls.map((one, at) => ({ role: "tool", callId: one.id, content: areas[at].value }));
      this.#answer(() => this.open.messages.push(...results));
    };
    this.list.append(el("div", { class: "results" }, fields, button("Send results", send)));
  }

  #sendInput() {
    const content = this.input.value;
    if (!(content.trim() || this.attachments.files.length)) {
      return;
    }
    this.#answer(() => {
      this.open.messages.push({ role: "user", content, files: this.attachments.take() });
      this.input.value = "";
    });
  }

  /**
   * Ask for an answer to the open conversation, and show it as it arrives. `change` first changes
   * the messages. It is not called while another answer arrives, or if a parameter is wrong.
   */
  async #answer(change) {
    if (this.stop !== null) {
      return;
    }
    const conversation = this.open;
    const { messages } = conversation;
    let parameters;
    try {
      parameters = { model: this.model(), ...this.parameters.body() };
    } catch (error) {
      notify(error.message);
      return;
    }
    notify("");
    change();
    conversation.system = byId("system").value;
    parameters.stream_options = { include_usage: true };
    const body = { ...parameters, messages: apiMessages(conversation), stream: true };
    const answer = {
      role: "assistant",
      content: "",
      reasoning: "",
      calls: [],
      finish: "",
      error: "",
      stats: {},
      parameters,
    };
    messages.push(answer);
    this.stop = new AbortController();
    this.#showBusy(true);
    const view = this.#render().at(-1);
    let frame = 0;
    const draw = () => {
      frame = 0;
      this.#stayAtEnd(() => view.update(this.stop !== null));
    };
    this.#save();
    view.update(true);
    announce("The model answers.");
    try {
      await receive(body, answer, this.stop.signal, () => (frame ||= requestAnimationFrame(draw)));
    } catch (error) {
      if (error.name === "AbortError") {
        answer.finish = "stopped";
      } else if (error instanceof ApiError) {
        answer.error = error.message;
      } else {
        throw error;
      }
    } finally {
      cancelAnimationFrame(frame);
      this.stop = null;
      this.#showBusy(false);
      draw();
      if (!this.deleted.has(conversation)) {
        saveConversation(conversation);
        this.#reload();
      }
    }
    this.#askForResults();
    if (conversation === this.open) {
      announce(answer.error || `Answer complete. ${answer.content}`);
    }
  }

  /** Keep the end of the messages in view, unless the reader has scrolled up. */
  #stayAtEnd(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.list;
    const isAtEnd = scrollHeight - scrollTop - clientHeight < 80;
    change();
    if (isAtEnd) {
      this.list.scrollTop = this.list.scrollHeight;
    }
  }

  #showBusy(isBusy) {
    const focused = document.activeElement;
    byId("send").hidden = isBusy;
    byId("stop").hidden = !isBusy;
    this.list.classList.toggle("busy", isBusy);
    if (focused === byId("send") || focused === byId("stop")) {
      this.input.focus();
    }
  }
}

/** Read the stream of one answer into `answer`, and call `changed` after each event. */
async function receive(body, answer, signal, changed) {
  const start = performance.now();
  let [first, last] = [0, 0];
  for await (const { choices, usage } of events(await call(PATH, { body, signal }))) {
    const delta = choices[0]?.delta ?? {};
    if (delta.content || delta.reasoning_content || delta.tool_calls) {
      last = performance.now();
      first ||= last;
      answer.stats.firstMs = first - start;
    }
    answer.content += delta.content ?? "";
    answer.reasoning += delta.reasoning_content ?? "";
    for (const { index, id, function: part } of delta.tool_calls ?? []) {
      const made = (answer.calls[index] ??= { id: "", name: "", arguments: "" });
      made.id ||= id ?? "";
      made.name ||= part.name ?? "";
      made.arguments += part.arguments;
    }
    answer.finish = choices[0]?.finish_reason ?? answer.finish;
    if (usage) {
      const { prompt_tokens: prompt, completion_tokens: output, prompt_tokens_details: details } = usage;
      Object.assign(answer.stats, { prompt, cached: details.cached_tokens, output });
      // The speed of tokens that arrive together cannot be measured.
      if (output > 1 && last - first > MIN_SPAN_MS) {
        answer.stats.perSecond = ((output - 1) * 1000) / (last - first);
      }
    }
    changed();
  }
}
