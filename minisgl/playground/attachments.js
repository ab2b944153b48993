// The files that the reader attaches to the next message: texts, and images as data URLs.

import { button, byId, el, notify } from "./dom.js";

const MAX_TEXT_BYTES = 1_000_000;
// The storage of a browser holds about 5 MB, so a larger image is stored with fewer pixels.
const MAX_IMAGE_BYTES = 500_000;
const MAX_SIDE = 2048;
const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const IMAGE_URL = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+=*$/;

export const isImageUrl = (url) => IMAGE_URL.test(url);

/** A small view of an attached image. */
export const thumbnail = (file) => el("img", { class: "thumbnail", src: file.image, alt: file.name });

/** Files from the button, from a drop on the chat, and from the clipboard. */
export class Attachments {
  constructor() {
    this.files = [];
    const [chat, input] = [byId("chat"), byId("file")];
    byId("attach").addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      const chosen = [...input.files];
      input.value = "";
      this.#add(chosen);
    });
    chat.addEventListener("dragover", (event) => event.preventDefault());
    chat.addEventListener("drop", (event) => this.#addFrom(event, event.dataTransfer));
    byId("prompt").addEventListener("paste", (event) => this.#addFrom(event, event.clipboardData));
  }

  /** The attached files, which are then no longer attached. */
  take() {
    const taken = this.files;
    this.files = [];
    this.#show();
    return taken;
  }

  #addFrom(event, { files }) {
    if (files.length) {
      event.preventDefault();
      this.#add([...files]);
    }
  }

  async #add(chosen) {
    for (const file of chosen) {
      try {
        this.files.push(await (IMAGE_TYPES.includes(file.type) ? readImage(file) : readText(file)));
      } catch (error) {
        notify(`The file ${file.name} cannot be attached: ${error.message}.`);
      }
    }
    this.#show();
    byId("prompt").focus();
  }

  #show() {
    const items = this.files.map((file, at) => {
      const drop = () => {
        this.files.splice(at, 1);
        this.#show();
      };
      const shown = file.image ? thumbnail(file) : `${file.name}, ${file.text.length} characters`;
      return el("li", {}, shown, button("\u00d7", drop, `Remove ${file.name}`));
    });
    byId("files").replaceChildren(...items);
  }
}

async function readText(file) {
  if (file.size > MAX_TEXT_BYTES) {
    throw new Error("it is larger than 1 MB");
  }
  const decoder = new TextDecoder("utf-8", { fatal: true });
  try {
    return { name: file.name, text: decoder.decode(await file.arrayBuffer()), image: "" };
  } catch {
    throw new Error("it is neither a UTF-8 text nor a PNG, JPEG, WEBP or GIF image");
  }
}

async function readImage(file) {
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error("the browser cannot decode this image");
  });
  const image = file.size > MAX_IMAGE_BYTES ? smaller(bitmap) : await dataUrl(file);
  bitmap.close();
  return { name: file.name, text: "", image };
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** The image as JPEG, with at most MAX_SIDE pixels a side, on white. */
function smaller(bitmap) {
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = el("canvas", { width: String(width), height: String(height) });
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  return canvas.toDataURL("image/jpeg", 0.9);
}
