// Keeps the conversations in the storage of the browser. Each conversation has its own entry, so that
// two tabs do not overwrite each other's conversations. The server stores no conversation.

import { isImageUrl } from "./attachments.js";
import { notify } from "./dom.js";

const PREFIX = "minisgl.conversation.";

const text = (value) => (typeof value === "string" ? value : "");
const list = (value) => (Array.isArray(value) ? value : []);
const record = (value) => (value && typeof value === "object" && !Array.isArray(value) ? value : {});

export const emptyConversation = (system = "") => ({
  id: `${Date.now()}-${crypto.getRandomValues(new Uint32Array(1))[0]}`,
  changed: Date.now(),
  system,
  messages: [],
});

/** All stored conversations, the newest first. Entries of another form are left out. */
export function loadConversations() {
  const found = Object.keys(localStorage)
    .filter((name) => name.startsWith(PREFIX))
    .map((name) => read(name.slice(PREFIX.length)))
    .filter((one) => one !== null);
  return found.sort((a, b) => b.changed - a.changed);
}

function read(id) {
  let stored;
  try {
    stored = record(JSON.parse(localStorage.getItem(PREFIX + id)));
  } catch {
    return null;
  }
  const messages = list(stored.messages).map(record).filter((one) =>
    ["user", "assistant", "tool"].includes(one.role),
  );
  return {
    id,
    changed: Number(stored.changed) || 0,
    system: text(stored.system),
    messages: messages.map(readMessage),
  };
}

/**
 * A stored message in its complete form. A message of the user has files, each with a text, or with
 * an image as a data URL. A tool's result has callId. An answer has reasoning, calls (tool calls),
 * finish, error, stats and parameters (the body of the request without messages).
 */
function readMessage(stored) {
  const message = { role: stored.role, content: text(stored.content) };
  if (stored.role === "user") {
    message.files = list(stored.files).map(record).map(({ name, text: content, image }) => ({
      name: text(name),
      text: text(content),
      image: isImageUrl(text(image)) ? image : "",
    }));
  } else if (stored.role === "tool") {
    message.callId = text(stored.callId);
  } else {
    message.reasoning = text(stored.reasoning);
    message.calls = list(stored.calls).map(record).map((one) => ({
      id: text(one.id),
      name: text(one.name),
      arguments: text(one.arguments),
    }));
    message.finish = text(stored.finish);
    message.error = text(stored.error);
    message.stats = record(stored.stats);
    message.parameters = record(stored.parameters);
  }
  return message;
}

export function saveConversation(conversation) {
  conversation.changed = Date.now();
  store(PREFIX + conversation.id, conversation);
}

export function deleteConversation(id) {
  localStorage.removeItem(PREFIX + id);
}

/** Store a value under a name. If the storage is full, show a notice. */
export function store(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch (error) {
    notify(`The browser cannot keep this: ${error.message}. Delete old conversations.`);
  }
}

/** The first words of a conversation. */
export function titleOf(conversation) {
  const first = conversation.messages[0];
  const words = (first?.content || first?.files?.[0]?.name || "").trim().replace(/\s+/g, " ");
  return words.length > 60 ? `${words.slice(0, 59)}\u2026` : words || "New conversation";
}

/** The messages as the API takes them. */
export function apiMessages(conversation, end = conversation.messages.length) {
  const { system, messages } = conversation;
  const sent = messages.slice(0, end).filter((one) => one.role !== "assistant" || one.content || one.calls.length);
  return [...(system.trim() ? [{ role: "system", content: system }] : []), ...sent.map(apiMessage)];
}

function apiMessage(message) {
  if (message.role === "user") {
    const texts = message.files.filter((file) => !file.image).map(quote);
    const images = message.files.filter((file) => file.image);
    const words = [message.content, ...texts].filter(Boolean).join("\n\n");
    if (!images.length) {
      return { role: "user", content: words };
    }
    const parts = images.map(({ image }) => ({ type: "image_url", image_url: { url: image } }));
    return { role: "user", content: [...parts, ...(words ? [{ type: "text", text: words }] : [])] };
  }
  if (message.role === "tool") {
    return { role: "tool", tool_call_id: message.callId, content: message.content };
  }
  const sent = { role: "assistant", content: message.content };
  if (message.reasoning) {
    sent.reasoning_content = message.reasoning;
  }
  if (message.calls.length) {
    sent.tool_calls = message.calls.map(({ id, ...call }) => ({ id, type: "function", function: call }));
  }
  return sent;
}

/** An attached file as Markdown, between fences longer than any in the file. */
function quote(file) {
  const longest = Math.max(2, ...(file.text.match(/`+/g) ?? []).map((ticks) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${file.name}:\n${fence}\n${file.text}\n${fence}`;
}
