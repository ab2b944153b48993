// The form of the request's parameters. An empty field leaves its parameter out of the request, so
// that the model's default holds. Each field shows this default.

import { byId, el } from "./dom.js";
import { store } from "./conversations.js";

const STORE = "minisgl.parameters";

// Groups of [parameter, label, kind, options]. `choices` are the values of a choice and their labels,
// `none` is the label of its empty value, and `initial` is the default of a switch. All other options
// are attributes of the input.
const GROUPS = {
  Sampling: [
    ["temperature", "Temperature", "number", { min: "0", max: "2", step: "any" }],
    ["top_p", "Top p", "number", { min: "0", max: "1", step: "any" }],
    ["top_k", "Top k", "number", { min: "-1", step: "1" }],
    ["min_p", "Min p", "number", { min: "0", max: "1", step: "any" }],
    ["repetition_penalty", "Repetition penalty", "number", { min: "0.01", max: "100", step: "any" }],
    ["frequency_penalty", "Frequency penalty", "number", { min: "-2", max: "2", step: "any" }],
    ["presence_penalty", "Presence penalty", "number", { min: "-2", max: "2", step: "any" }],
    ["seed", "Seed", "number", { step: "1", placeholder: "random" }],
    ["logit_bias", "Logit bias", "json", { placeholder: '{"364": -5}' }],
  ],
  "Length and end": [
    ["max_tokens", "Max tokens", "number", { min: "1", step: "1", placeholder: "no limit" }],
    ["min_tokens", "Min tokens", "number", { min: "0", step: "1", placeholder: "0" }],
    ["stop", "Stop strings, one per line", "lines", {}],
    ["stop_token_ids", "Stop token ids", "numbers", { placeholder: "2, 17" }],
    ["ignore_eos", "Ignore end of sequence", "switch", {}],
    ["skip_special_tokens", "Skip special tokens", "switch", { initial: true }],
    ["include_stop_str_in_output", "Keep the stop string", "switch", {}],
  ],
  Reasoning: [
    ["enable_thinking", "Thinking", "choice", { choices: { true: "on", false: "off" } }],
    ["reasoning_effort", "Effort", "text", { placeholder: "template default" }],
  ],
  "JSON schema": [["schema", "Schema of the answer", "json", { placeholder: '{"type": "object"}' }]],
  Tools: [
    ["tools", "Tools, as a JSON list", "json", { placeholder: '[{"type": "function", \u2026}]' }],
    ["tool_choice", "Tool choice", "choice", { choices: { none: "none", required: "required" }, none: "auto" }],
    ["parallel_tool_calls", "Several calls at once", "switch", { initial: true }],
  ],
};
const FIELDS = Object.values(GROUPS).flat();

/** The form. `body` reads it, and `showDefaults` fills in the defaults of the model. */
export class Parameters {
  constructor() {
    let kept = {};
    try {
      kept = Object(JSON.parse(localStorage.getItem(STORE)));
    } catch {
      localStorage.removeItem(STORE);
    }
    this.inputs = {};
    const groups = Object.entries(GROUPS).map(([title, fields]) =>
      el("fieldset", {}, el("legend", {}, title), fields.map((field) => this.#field(field, kept))),
    );
    byId("parameters").append(...groups);
    byId("parameters").addEventListener("change", () => store(STORE, this.#values()));
    byId("reset").addEventListener("click", () => {
      FIELDS.forEach((field) => this.#set(field, undefined));
      localStorage.removeItem(STORE);
    });
  }

  #field([name, label, kind, { choices, none, initial, ...attributes }], kept) {
    const id = `parameter-${name}`;
    let input;
    if (kind === "choice") {
      const options = [["", none ?? "default of the model"], ...Object.entries(choices)];
      input = el("select", { id }, options.map(([value, shown]) => el("option", { value }, shown)));
    } else if (kind === "json" || kind === "lines") {
      input = el("textarea", { id, rows: "2", spellcheck: "false", ...attributes });
    } else {
      const type = { number: "number", switch: "checkbox" }[kind] ?? "text";
      input = el("input", { id, type, autocomplete: "off", ...attributes });
    }
    this.inputs[name] = input;
    this.#set([name, label, kind, { initial }], kept[name]);
    return el("div", { class: `field ${kind}` }, el("label", { for: id }, label), input);
  }

  #set([name, , kind, { initial }], value) {
    const input = this.inputs[name];
    if (kind === "switch") {
      input.checked = typeof value === "boolean" ? value : initial === true;
    } else {
      input.value = typeof value === "string" ? value : "";
    }
    input.removeAttribute("aria-invalid");
  }

  #values() {
    return Object.fromEntries(
      FIELDS.map(([name, , kind]) => [name, this.inputs[name][kind === "switch" ? "checked" : "value"]]),
    );
  }

  showDefaults(defaults) {
    for (const [name, value] of Object.entries(defaults ?? {})) {
      if (this.inputs[name]) {
        this.inputs[name].placeholder = String(value);
      }
    }
  }

  /** The parameters that differ from their defaults. Throws an Error that names a wrong field. */
  body() {
    const found = {};
    for (const field of FIELDS) {
      const value = this.#read(field);
      if (value !== undefined) {
        found[field[0]] = value;
      }
    }
    const { schema, enable_thinking, reasoning_effort, ...body } = found;
    if (schema !== undefined) {
      body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    }
    if (enable_thinking !== undefined || reasoning_effort !== undefined) {
      body.chat_template_kwargs = { reasoning_effort };
      if (enable_thinking !== undefined) {
        body.chat_template_kwargs.enable_thinking = enable_thinking === "true";
      }
    }
    if (!body.tools) {
      delete body.tool_choice;
      delete body.parallel_tool_calls;
    }
    return body;
  }

  #read([name, label, kind, { initial }]) {
    const input = this.inputs[name];
    input.removeAttribute("aria-invalid");
    if (kind === "switch") {
      return input.checked === (initial === true) ? undefined : input.checked;
    }
    const written = kind === "lines" ? input.value : input.value.trim();
    try {
      if (!input.validity.valid) {
        throw new Error(input.validationMessage);
      }
      return written === "" ? undefined : READ[kind](written);
    } catch (error) {
      input.setAttribute("aria-invalid", "true");
      throw new Error(`${label}: ${error.message}`);
    }
  }
}

const READ = {
  text: String,
  choice: String,
  number: Number,
  json: JSON.parse,
  lines: (written) => written.split("\n").filter(Boolean),
  numbers: (written) => written.split(/[\s,]+/).filter(Boolean).map(Number),
};
