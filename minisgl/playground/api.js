// Calls the server. The API key stays in the memory of this page. The page neither stores nor shows
// it.

import { byId } from "./dom.js";

const CUT = "The connection ended before the answer was complete.";

let key = "";
let asking = null;

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => key !== "";

/** The URL of a path of the server. The page may be served below a path prefix of a proxy. */
export const urlOf = (path) => new URL(path, document.baseURI).href;

/**
 * Send a request and return the response. With `body`, the request is a POST with this JSON. If the
 * server wants a key, the page asks for one and sends the request again.
 * Throws ApiError with the server's message.
 */
export async function call(path, { body, signal } = {}) {
  for (;;) {
    const sent = key;
    const headers = sent ? { authorization: `Bearer ${sent}` } : {};
    const options = { headers, signal, cache: "no-store", referrerPolicy: "no-referrer" };
    if (body !== undefined) {
      headers["content-type"] = "application/json";
      Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    }
    const response = await fetch(urlOf(path), options).catch((error) => {
      throw error.name === "AbortError" ? error : new ApiError("The server cannot be reached.", 0);
    });
    if (response.ok) {
      return response;
    }
    if (response.status === 401) {
      if (sent === key) {
        await askKey(sent ? "The server does not know this key." : "");
      }
      continue;
    }
    const error = (await response.json().catch(() => ({}))).error ?? {};
    throw new ApiError(error.message ?? `The server answered ${response.status}.`, response.status);
  }
}

export const getJson = async (path, options) => (await call(path, options)).json();

/** The events of a stream until [DONE]. An event with an error is thrown as ApiError. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      // A lost connection is a TypeError.
      throw error.name === "AbortError" ? error : new ApiError(CUT, 0);
    });
    if (done) {
      throw new ApiError(CUT, 0);
    }
    const blocks = (buffer + value).split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks.filter((text) => text.startsWith("data: "))) {
      const data = block.slice(6);
      if (data === "[DONE]") {
        return;
      }
      const event = JSON.parse(data);
      if (event.error) {
        throw new ApiError(event.error.message, event.error.code);
      }
      yield event;
    }
  }
}

/** Ask the reader for the key. All requests that need the key wait for the same dialog. */
export function askKey(message = "") {
  asking ??= new Promise((resolve, reject) => {
    const [dialog, input] = [byId("key-dialog"), byId("key")];
    byId("key-message").textContent = message;
    input.value = key;
    dialog.onclose = () => {
      asking = null;
      if (dialog.returnValue === "use") {
        key = input.value.trim();
        resolve();
      } else {
        reject(new ApiError("The server needs an API key. Use the button Key to give one.", 401));
      }
      input.value = "";
      dialog.returnValue = "";
    };
    dialog.showModal();
    input.focus();
  });
  return asking;
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("key-dialog").close("use");
});
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close(""));
