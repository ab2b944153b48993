// Starts the page: the views, the state of the server in the head, and the list of models.

import { askKey, getJson } from "./api.js";
import { Chat } from "./chat.js";
import { byId, el, notify } from "./dom.js";
import { Engine } from "./engine.js";
import { Poller, stateOf } from "./metrics.js";
import { Parameters } from "./parameters.js";
import { startTokenizer } from "./tokenizer.js";
import { Tokens } from "./tokens.js";

const VIEWS = ["chat", "tokens", "engine"];
const model = () => byId("model").value;

const parameters = new Parameters();
const tokens = new Tokens(model);
const engine = new Engine();
new Chat(parameters, model);
startTokenizer(model);

let models = [];
let isLoading = false;

/** Ask for the models again, after the key was given or the model has been loaded. */
async function loadModels() {
  if (isLoading) {
    return;
  }
  isLoading = true;
  try {
    models = (await getJson("v1/models")).data;
    const selected = model();
    byId("model").replaceChildren(...models.map(({ id }) => el("option", { value: id }, id)));
    byId("model").value = models.some(({ id }) => id === selected) ? selected : models[0].id;
    showModel();
    notify("");
  } catch (error) {
    notify(error.message);
  } finally {
    isLoading = false;
  }
}

function showModel() {
  const { sampling_defaults: defaults, max_model_len: length } = models.find(({ id }) => id === model());
  parameters.showDefaults(defaults);
  tokens.showDefaults(defaults);
  byId("context").textContent = length ? `Context of ${length.toLocaleString("en")} tokens.` : "";
}

const view = () => VIEWS.find((name) => location.hash === `#${name}`) ?? VIEWS[0];

function onScrape(scrape) {
  const state = stateOf(scrape);
  const pill = byId("state");
  const isNew = pill.textContent !== state;
  if (isNew) {
    pill.textContent = state;
    pill.className = `pill ${state.replace(" ", "-")}`;
  }
  if (isNew && (state === "ready" || models.length === 0)) {
    loadModels();
  }
  if (view() === "engine") {
    engine.draw(poller.history, scrape);
  }
}

const poller = new Poller(5000, onScrape);

function showView() {
  for (const name of VIEWS) {
    byId(name).hidden = name !== view();
    const link = byId(`to-${name}`);
    if (name === view()) {
      link.setAttribute("aria-current", "page");
    } else {
      link.removeAttribute("aria-current");
    }
  }
  document.title = `${byId(`to-${view()}`).textContent} \u00b7 minisgl`;
  poller.every(view() === "engine" ? 1000 : 5000);
}

/** The panels of the chat. On a phone, a panel takes the place of the messages, so one is open. */
const isPhone = matchMedia("(max-width: 50rem)");
const panels = ["conversations", "settings"];

function togglePanel(panel) {
  const { classList } = document.body;
  classList.toggle(`shows-${panel}`);
  if (isPhone.matches) {
    panels.filter((one) => one !== panel).forEach((one) => classList.remove(`shows-${one}`));
  }
  panels.forEach((one) => byId(`show-${one}`).setAttribute("aria-expanded", classList.contains(`shows-${one}`)));
}

byId("model").addEventListener("change", showModel);
byId("key-button").addEventListener("click", () => askKey().then(loadModels, () => {}));
byId("notice-close").addEventListener("click", () => notify(""));
addEventListener("hashchange", showView);
panels.forEach((panel) => byId(`show-${panel}`).addEventListener("click", () => togglePanel(panel)));
if (!isPhone.matches) {
  togglePanel("conversations");
}
if (matchMedia("(min-width: 75rem)").matches) {
  togglePanel("settings");
}
showView();
