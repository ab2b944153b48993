// Shows the request of an answer as curl, Python or JSON. The texts name the variable
// MINISGL_API_KEY in place of the key.

import { hasKey, urlOf } from "./api.js";
import { byId, copyButton } from "./dom.js";

// The parameters of OpenAI's Python client; it takes all others in extra_body.
const OPENAI = new Set(
  ("model messages prompt max_tokens temperature top_p n stop seed stream stream_options logprobs echo " +
    "frequency_penalty presence_penalty logit_bias response_format tools tool_choice parallel_tool_calls").split(" "),
);

const FORMS = { curl, python, json: (path, body) => JSON.stringify(body, null, 2) };
let shown = null;

/** Open the dialog with the request of this body to this path. Images are cut, because they are long. */
export function showRequest(path, body) {
  const cut = (_, value) => (String(value).startsWith("data:image/") ? `${value.slice(0, 40)}...` : value);
  shown = { path, body: JSON.parse(JSON.stringify(body, cut)) };
  showForm("curl");
  byId("request-dialog").showModal();
}

function showForm(form) {
  byId("request-text").textContent = FORMS[form](shown.path, shown.body);
  for (const tab of byId("request-forms").children) {
    tab.setAttribute("aria-pressed", String(tab.value === form));
  }
}

function curl(path, body) {
  const data = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const parts = [
    `curl -N '${urlOf(path)}'`,
    "-H 'Content-Type: application/json'",
    hasKey() && '-H "Authorization: Bearer $MINISGL_API_KEY"',
    `-d '${data}'`,
  ];
  return parts.filter(Boolean).join(" \\\n  ");
}

function python(path, body) {
  const own = Object.entries(body).filter(([name]) => OPENAI.has(name));
  const extra = Object.entries(body).filter(([name]) => !OPENAI.has(name));
  const lines = own.map(([name, value]) => `    ${name}=${literal(value, "    ")},`);
  if (extra.length) {
    lines.push(`    extra_body=${literal(Object.fromEntries(extra), "    ")},`);
  }
  const isChat = path.includes("chat");
  const key = hasKey() ? 'os.environ["MINISGL_API_KEY"]' : '"none"';
  return [
    ...(hasKey() ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${urlOf("v1")}", api_key=${key})`,
    `stream = client.${isChat ? "chat.completions" : "completions"}.create(`,
    ...lines,
    ")",
    "for chunk in stream:",
    "    if chunk.choices:",
    `        print(chunk.choices[0].${isChat ? 'delta.content or ""' : "text"}, end="", flush=True)`,
  ].join("\n");
}

/** A value as Python writes it. JSON strings are Python strings, except for lone surrogates. */
function literal(value, indent) {
  const inner = `${indent}    `;
  const join = (open, parts, close) =>
    parts.length ? `${open}\n${parts.map((part) => inner + part).join(",\n")},\n${indent}${close}` : open + close;
  if (Array.isArray(value)) {
    return join("[", value.map((one) => literal(one, inner)), "]");
  }
  if (value && typeof value === "object") {
    const entries = Object.entries(value).filter(([, one]) => one !== undefined);
    return join("{", entries.map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, inner)}`), "}");
  }
  return new Map([[true, "True"], [false, "False"], [null, "None"]]).get(value) ?? JSON.stringify(value);
}

byId("request-forms").addEventListener("click", (event) => {
  if (event.target.value) {
    showForm(event.target.value);
  }
});
byId("request-foot").append(copyButton("Copy", () => byId("request-text").textContent));
byId("request-close").addEventListener("click", () => byId("request-dialog").close());
