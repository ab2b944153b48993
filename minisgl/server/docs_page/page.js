// Reads /openapi.json and shows it with Swagger UI. If the server has API keys, it answers 401 to a
// request without a key, and the page asks for one. The key stays in the memory of this page.
"use strict";

const form = document.getElementById("key-form");
const message = document.getElementById("message");

async function show(key) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  let response;
  try {
    response = await fetch("openapi.json", { headers });
  } catch (error) {
    return ask(`The server cannot be reached: ${error.message}`);
  }
  if (response.status === 401) {
    return ask(key ? "The server does not know this key." : "");
  }
  if (!response.ok) {
    return ask(`The server answered ${response.status} instead of the API description.`);
  }
  form.hidden = true;
  render(await response.json(), key);
}

function ask(text) {
  message.textContent = text;
  form.hidden = false;
  document.getElementById("key").focus();
}

function render(description, key) {
  // The page may be served below a path prefix of a proxy.
  const folder = new URL(".", window.location.href).pathname.replace(/\/$/, "");
  description.servers = [{ url: folder || "/" }];
  const page = SwaggerUIBundle({
    spec: description,
    dom_id: "#swagger-ui",
    validatorUrl: null,
    onComplete() {
      for (const scheme of Object.keys(description.components.securitySchemes)) {
        if (key) {
          page.preauthorizeApiKey(scheme, key);
        }
      }
    },
  });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  show(document.getElementById("key").value.trim());
});

show("");
