// Shows the tokens of a text with their ids, and the text of token ids.

import { getJson } from "./api.js";
import { announce, byId, el, notify } from "./dom.js";
import { shown } from "./tokens.js";

const MAX_SHOWN = 2000;

/** Connect both forms to the server. model: returns the name of the selected model. */
export function startTokenizer(model) {
  onSubmit("tokenize", async () => {
    const text = byId("tokenize-text").value;
    const input = byId("tokenize-chat").checked ? { messages: [{ role: "user", content: text }] } : { prompt: text };
    const body = { model: model(), ...input, return_token_strs: true };
    const { count, tokens, token_strs: texts } = await getJson("tokenize", { body });
    const items = tokens.slice(0, MAX_SHOWN).map((id, at) =>
      el("li", { class: `tint${at % 4}` }, el("span", {}, shown(texts[at])), el("small", {}, String(id))),
    );
    byId("tokenize-result").replaceChildren(...items);
    const rest = count > MAX_SHOWN ? `, the first ${MAX_SHOWN} shown` : "";
    byId("tokenize-facts").textContent = `${count} tokens, ${[...text].length} characters${rest}`;
    byId("detokenize-ids").value = tokens.join(" ");
    announce(`${count} tokens`);
  });
  onSubmit("detokenize", async () => {
    const ids = byId("detokenize-ids").value.match(/\d+/g) ?? [];
    const { prompt } = await getJson("detokenize", { body: { model: model(), tokens: ids.map(Number) } });
    byId("detokenize-result").textContent = prompt;
    announce(`Text: ${prompt}`);
  });
}

function onSubmit(id, act) {
  byId(id).addEventListener("submit", async (event) => {
    event.preventDefault();
    notify("");
    await act().catch((error) => notify(error.message));
  });
}
