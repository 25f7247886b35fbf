// The page: requests what is served, asks the user for a key if needed, and then opens the chat, the
// list of conversations and the live view. While the server starts it waits, and begins by itself.

import { authorization, keepKey, request, said } from "./api.js";
import { Chat } from "./chat.js";
import { $ } from "./elements.js";
import { History } from "./history.js";
import { Live } from "./live.js";
import { keep, recall, Store } from "./store.js";
import { Conversation } from "./tree.js";

const STATES = {
  wait: "Connecting", start: "Starting", key: "No access", live: "Live", restart: "Restarting",
  lost: "Not connected",
};
const START_MS = 1000; // between two looks at a server that starts
const OPEN = "aioinfer-open"; // of this tab: the conversation that a reload opens again

function showState(state) {
  if ($("status").dataset.state === state) return;
  $("status").dataset.state = state;
  $("status").textContent = STATES[state];
  $("engine").classList.toggle("stale", state === "lost" || state === "start");
  $("gone").hidden = state !== "lost";
}

function showModels(models) {
  for (const id of ["model", "compare-model"])
    $(id).replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  for (const [index, { input_modalities: reads = [] }] of models.entries())
    $("model").options[index].dataset.reads = reads.join(" ");
  $("model").disabled = models.length < 2;
  const last = recall("model");
  if (models.some(({ id }) => id === last)) $("model").value = last;
}

/** Marks the models that sleep, where several take turns. */
function showTurns(models) {
  const asleep = new Set(models.filter(({ status }) => status?.value === "unloaded").map(({ id }) => id));
  for (const option of document.querySelectorAll("#model option, #compare-model option"))
    option.textContent = asleep.has(option.value) ? `${option.value} (asleep)` : option.value;
}

async function served() {
  return (await (await request("/v1/models")).json()).data;
}

/** Shows what can be set for the chosen model. */
async function openChosen(chat) {
  const query = new URLSearchParams({ model: $("model").value });
  chat.open(await (await request(`/page/info?${query}`)).json());
}

function showTitle({ title }) {
  document.title = [title || $("model").value, "aioinfer"].filter(Boolean).join(" · ");
}

/** Shows why nothing can be done yet, and offers what helps: a key, or another try. */
function showNotice(error) {
  const needsKey = error.status === 401;
  const wasWrong = needsKey && "Authorization" in authorization();
  const asks = wasWrong ? "This key was not accepted." : "This server asks for an API key.";
  $("notice-text").textContent = needsKey ? asks : said(error);
  $("key-form").hidden = !needsKey;
  $("retry").hidden = needsKey;
  $("notice").hidden = false;
  $("hint").textContent = "";
  showState(needsKey ? "key" : "lost");
  if (needsKey) $("key").focus();
}

async function start(chat, live) {
  try {
    const models = await served();
    showModels(models);
    showTurns(models);
    await openChosen(chat);
    $("notice").hidden = true;
    showTitle(chat.conversation);
    live.start();
  } catch (error) {
    if (!error.isStarting) return showNotice(error);
    $("notice").hidden = true;
    $("hint").textContent = `${error.message[0].toUpperCase()}${error.message.slice(1)}.`;
    showState("start");
    setTimeout(() => start(chat, live), START_MS);
  }
}

/** On a narrow screen one part of the page is shown: the list, the chat or the engines. */
function showPane(name) {
  document.body.dataset.pane = name;
  for (const made of document.querySelectorAll("[data-shows]"))
    made.setAttribute("aria-pressed", String(made.dataset.shows === name));
}

function followTheme() {
  const show = (theme) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    $("theme").value = theme;
  };
  show(recall("theme", "system"));
  $("theme").addEventListener("change", () => {
    keep("theme", $("theme").value);
    show($("theme").value);
  });
}

async function main() {
  followTheme();
  for (const made of document.querySelectorAll("[data-shows]")) {
    made.addEventListener("click", () => {
      const isShown = document.body.dataset.pane === made.dataset.shows;
      showPane(isShown ? "chat" : made.dataset.shows);
    });
  }
  const store = new Store((id) => history.refresh(id));
  const chat = new Chat(store, (conversation) => {
    const isOpen = conversation === chat.conversation;
    history.take(conversation, isOpen);
    if (!isOpen) return; // the end of an answer in a conversation that was left
    sessionStorage.setItem(OPEN, conversation.id);
    $("private").hidden = !conversation.isPrivate;
    showTitle(conversation);
  });
  const open = (conversation) => {
    chat.show(conversation);
    showPane("chat");
  };
  const history = new History(store, open);
  // where the list does not come, `live` finds out that the server is lost
  const live = new Live(showState, () => served().then(showTurns, () => {}));
  $("clear").addEventListener("click", () => open(new Conversation()));
  $("model").addEventListener("change", () => {
    keep("model", $("model").value);
    openChosen(chat).catch(showNotice);
  });
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    keepKey($("key").value.trim());
    $("key").value = "";
    start(chat, live);
  });
  $("retry").addEventListener("click", () => start(chat, live));
  start(chat, live);
  if (!(await store.open())) {
    $("no-conversation").textContent = "This browser keeps no conversations.";
    return;
  }
  await history.load();
  const last = history.get(sessionStorage.getItem(OPEN)); // of this tab, before a reload
  if (last && chat.conversation.isEmpty) chat.show(last);
}

main();
