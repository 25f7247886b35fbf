// The page: requests what is served, asks the user for a key if needed, and then opens the chat and the
// live view.

import { keepKey, request } from "./api.js";
import { Chat } from "./chat.js";
import { Live } from "./live.js";

const STATES = { wait: "Connecting", live: "Live", restart: "Restarting", lost: "Not connected" };

const $ = (id) => document.getElementById(id);

function showState(state) {
  if ($("status").dataset.state === state) return;
  $("status").dataset.state = state;
  $("status").textContent = STATES[state];
}

function showModels(models) {
  $("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
  $("model").disabled = models.length < 2;
  document.title = `${models[0].id} · aioinfer`;
}

/** Shows why nothing can be done yet, and offers what helps: a key, or another try. */
function showNotice(error) {
  const needsKey = error.status === 401;
  $("notice-text").textContent = needsKey
    ? "This server asks for an API key."
    : `${error.status || ""} ${error.message}`.trim();
  $("key-form").hidden = !needsKey;
  $("retry").hidden = needsKey;
  $("notice").hidden = false;
  showState("lost");
  if (needsKey) $("key").focus();
}

async function start(chat, live) {
  try {
    const [models, info] = await Promise.all([
      request("/v1/models").then((response) => response.json()),
      request("/page/info").then((response) => response.json()),
    ]);
    $("notice").hidden = true;
    showModels(models.data);
    chat.open(info);
    live.start();
  } catch (error) {
    showNotice(error);
  }
}

function main() {
  const chat = new Chat();
  const live = new Live(showState);
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    keepKey($("key").value.trim());
    $("key").value = "";
    start(chat, live);
  });
  $("retry").addEventListener("click", () => start(chat, live));
  start(chat, live);
}

main();
