// Builds the document. Every text enters it as a text node, so no string is ever parsed as HTML.

/**
 * A new element. A function is a listener ("onclick"), a boolean switches an attribute on or off,
 * and any other value is the text of an attribute. Children that are null or false are left out.
 */
export function el(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** As `el`, for SVG. */
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") {
      node.addEventListener(name.slice(2), value);
    } else if (name === "value") {
      node.value = value;
    } else if (typeof value === "boolean") {
      node.toggleAttribute(name, value);
    } else {
      node.setAttribute(name, value);
    }
  }
  node.append(...children.flat().filter((child) => child !== null && child !== false));
  return node;
}

export const byId = (id) => document.getElementById(id);

/** A small button with a label. `name` describes it to screen readers if the label is too short. */
export function button(label, onclick, name = label) {
  return el("button", { type: "button", class: "small", "aria-label": name, onclick }, label);
}

/** Let screen readers read a text aloud. The focus stays. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** Show an error above the view until the reader closes it; "" removes the last one. */
export function notify(text) {
  byId("notice-text").textContent = text;
  byId("notice").hidden = text === "";
}

/** Copy a text. Without HTTPS, browsers have no clipboard API except on this machine. */
export async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
  } else {
    const area = el("textarea", { class: "unseen", value: text });
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  announce("Copied");
}

/** A button that copies the result of `read`. Its label then is "Copied" for two seconds. */
export function copyButton(label, read) {
  const made = button(label, async () => {
    await copy(read());
    made.textContent = "Copied";
    setTimeout(() => (made.textContent = label), 2000);
  });
  return made;
}
