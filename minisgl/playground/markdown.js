// Shows Markdown of a model. The lexer of marked splits the text into tokens, and this module makes
// an element for each kind of token that it knows. HTML in the text is shown as text. An image
// becomes a link, so the page never loads anything because of an answer.

import { copyButton, el } from "./dom.js";
import { defaults, lexer, Tokenizer } from "./marked.esm.js";

// A longer text is shown as it is, because the lexer runs again for each piece of a stream.
const MAX_CHARS = 200_000;
// Time of the lexer for a text. Some short texts, such as many "_a", take it seconds.
const BUDGET_MS = 300;
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

/** An element that shows a Markdown text, which may grow. Blocks that did not change stay. */
export class Markdown {
  constructor() {
    this.node = el("div", { class: "markdown" });
    this.shown = [];
    this.plain = false; // The lexer took too long, so the rest of a stream is not parsed either.
  }

  show(text) {
    let tokens = [];
    let nodes;
    try {
      tokens = text.length > MAX_CHARS || this.plain ? [{ type: "long", raw: text }] : tokensOf(text);
      const same = this.shown.findIndex((raw, at) => raw !== tokens[at]?.raw);
      const kept = same < 0 ? this.shown.length : same;
      nodes = tokens.slice(kept).map((token) => el("div", { class: "block" }, block(token)));
      while (this.node.childNodes.length > kept) {
        this.node.lastChild.remove();
      }
    } catch (error) {
      if (!(error instanceof RangeError)) {
        throw error;
      }
      // The text is nested deeper than the stack of the browser, or it took too long.
      this.plain = error instanceof OutOfTime;
      this.node.replaceChildren();
      tokens = [{ raw: text }];
      nodes = [el("pre", {}, text)];
    }
    this.node.append(...nodes);
    this.shown = tokens.map((token) => token.raw);
  }
}

class OutOfTime extends RangeError {}

/** The tokens of a text. Throws OutOfTime if the lexer takes longer than BUDGET_MS. */
function tokensOf(text) {
  const end = performance.now() + BUDGET_MS;
  // The lexer calls a method of the tokenizer at each place of the text.
  const tokenizer = new Proxy(new Tokenizer(), {
    get(methods, name) {
      if (performance.now() > end) {
        throw new OutOfTime("the lexer took too long");
      }
      return methods[name];
    },
  });
  return lexer(text, { ...defaults, tokenizer });
}

function block(token) {
  switch (token.type) {
    case "space":
    case "def":
      return [];
    case "heading":
      return el(`h${Math.min(token.depth + 2, 6)}`, {}, inline(token.tokens));
    case "paragraph":
      return el("p", {}, inline(token.tokens));
    case "code":
      return code(token);
    case "blockquote":
      return el("blockquote", {}, token.tokens.map(block));
    case "hr":
      return el("hr");
    case "list": {
      const start = token.ordered && token.start !== 1 ? { start: String(token.start) } : {};
      return el(token.ordered ? "ol" : "ul", start, token.items.map(block));
    }
    case "list_item":
      return el("li", {}, token.tokens.map(block));
    case "table":
      return table(token);
    case "html":
    case "long":
      return el("p", { class: "plain" }, token.raw);
    default:
      return inline([token]);
  }
}

function code(token) {
  const language = (token.lang ?? "").split(/\s/, 1)[0];
  const head = el("div", { class: "code-head" }, language || "text", copyButton("Copy", () => token.text));
  const body = el("pre", { tabindex: "0" }, el("code", {}, token.text));
  return el("div", { class: "code" }, head, body);
}

function table(token) {
  const cell = (tag) => (one) => el(tag, one.align ? { class: one.align } : {}, inline(one.tokens));
  const row = (tag) => (cells) => el("tr", {}, cells.map(cell(tag)));
  const head = el("thead", {}, row("th")(token.header));
  const rows = el("tbody", {}, token.rows.map(row("td")));
  return el("div", { class: "scrolls", tabindex: "0" }, el("table", {}, head, rows));
}

const inline = (tokens) => tokens.map(span).flat();

function span(token) {
  switch (token.type) {
    case "strong":
    case "em":
    case "del":
      return el(token.type, {}, inline(token.tokens));
    case "codespan":
      return el("code", {}, token.text);
    case "br":
      return el("br");
    case "link":
      return link(token.href, inline(token.tokens));
    case "image":
      return link(token.href, [`image: ${token.text || token.href}`]);
    case "checkbox":
      return token.checked ? "\u2611 " : "\u2610 ";
    case "escape":
      return token.text;
    case "text":
      return token.tokens ? inline(token.tokens) : entities(token.raw);
    default:
      return token.raw;
  }
}

/** A link to a web address. Other addresses, such as javascript: and data:, are shown as text. */
function link(href, children) {
  if (!/^https?:\/\//i.test(href)) {
    return [...children, ` (${href})`];
  }
  const rel = "noopener noreferrer nofollow";
  return el("a", { href, rel, target: "_blank", title: href }, children);
}

/** Replace the HTML entities in a text by their characters. */
function entities(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|([a-z]{2,4}));/gi, (raw, decimal, hex, name) => {
    const point = decimal ? Number(decimal) : parseInt(hex, 16);
    return name ? (NAMED[name] ?? raw) : point > 0 && point <= 0x10ffff ? String.fromCodePoint(point) : raw;
  });
}
