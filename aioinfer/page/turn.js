// One turn of the log: what the user said, the answer to it (or two, side by side), and what can be
// done with both: edit, regenerate, continue, copy, delete, go through the versions.

import { element } from "./elements.js";
import { copy, menu, tool } from "./menu.js";
import { contentOf, picturesOf, rowOf, textOf } from "./pictures.js";
import { codeOf } from "./requests.js";

/**
 * A turn. `actions` does what the user asks for: `edit(node, content)`, `regenerate(node)`,
 * `resume(node)`, `choose(node)`, `remove(node)`, `branch(node, text)` and `versions(node)`.
 */
export class Turn {
  node = element("article", "turn");
  #actions;
  #replies = element("div", "replies");

  /** `user` is the node of the user's message; null for an answer to the results of tools. */
  constructor(actions, user = null) {
    this.#actions = actions;
    if (user) this.#showUser(user);
    else this.node.classList.add("goes-on");
    this.node.append(this.#replies);
  }

  /** Shows an answer that comes, or that was kept; `label` heads one of two. */
  add(answer, label = "") {
    if (label) answer.node.prepend(element("h3", "column", label));
    this.#replies.append(answer.node);
    this.#replies.classList.toggle("pair", this.#replies.children.length > 1);
    this.node.classList.toggle("busy", answer.node.classList.contains("busy"));
  }

  /** Shows what can be done with an answer that is complete; `body` is its request, if known. */
  complete(answer, node, body = null) {
    this.node.classList.toggle("busy", Boolean(this.node.querySelector(".reply.busy")));
    if (!node) return;
    const { message, facts } = node;
    const bar = element("div", "tools");
    bar.dataset.of = node.id;
    if (this.#replies.classList.contains("pair"))
      bar.append(tool("Go on with this", () => this.#actions.choose(node)));
    else bar.append(...this.#versions(node));
    const shown = answer.node.querySelector(".answer");
    if (message.content) bar.append(tool("Copy", () => copy(message.content, shown), "Copy as Markdown"));
    bar.append(tool("Regenerate", () => this.#actions.regenerate(node), "Answer once more"));
    if (message.content && !message.tool_calls && facts.reason !== "stop")
      bar.append(tool("Continue", () => this.#actions.resume(node), "Continue the answer"));
    if (answer.tokens.length) bar.append(this.#tokensButton(answer, node));
    bar.append(menu("More for this answer", this.#more(answer, node, body)));
    answer.node.append(bar);
    if (facts.failure && !answer.node.querySelector(".failure"))
      answer.node.append(element("p", "failure", facts.failure));
  }

  #tokensButton(answer, node) {
    const made = tool("Probabilities", () => {
      const isShown = made.ariaPressed !== "true";
      made.ariaPressed = String(isShown);
      answer.showTokens(isShown, (text) => this.#actions.branch(node, text));
    });
    made.ariaPressed = "false";
    return made;
  }

  #more(answer, node, body) {
    const { message } = node;
    const shown = answer.node.querySelector(".answer");
    const actions = [
      ["Copy as plain text", () => copy(shown.innerText, shown)],
      ["Edit the answer", () => this.#edit(node, shown)],
    ];
    if (body) {
      actions.push(["Copy the request as curl", () => copy(codeOf("curl", body))]);
      actions.push(["Copy the request as Python", () => copy(codeOf("python", body))]);
    }
    actions.push(["Delete from here", () => this.#actions.remove(node)]);
    return message.content ? actions : actions.filter(([name]) => !name.includes("plain"));
  }

  #showUser(user) {
    const text = textOf(user.message.content);
    const pictures = picturesOf(user.message.content);
    const said = element("div", "said user", text);
    said.dir = "auto"; // Arabic and Hebrew begin at the right
    said.hidden = !text;
    // of a message whose answer was deleted, or did not come before the page was closed
    const unanswered = tool("Answer", () => this.#actions.regenerate({ parent: user.id }));
    unanswered.classList.add("unanswered");
    const bar = element("div", "tools of-user");
    bar.dataset.of = user.id;
    bar.append(
      ...this.#versions(user),
      unanswered,
      tool("Edit", () => this.#edit(user, said), "Edit the message"),
      tool("Copy", () => copy(text, said), "Copy the message"),
      tool("Delete", () => this.#actions.remove(user), "Delete the message and what follows"),
    );
    if (pictures.length) this.node.append(rowOf(pictures));
    this.node.append(said, bar);
  }

  /** The buttons that go from version to version, `‹ 2/3 ›`. */
  #versions(node) {
    const versions = this.#actions.versions(node);
    if (versions.length < 2) return [];
    const at = versions.findIndex((each) => each.id === node.id);
    const step = (by, text, label) => {
      const made = tool(text, () => this.#actions.choose(versions[at + by], label), label);
      made.classList.add("arrow");
      made.disabled = !versions[at + by];
      return made;
    };
    const count = element("span", "quiet version", `${at + 1}/${versions.length}`);
    return [step(-1, "‹", "Version before"), count, step(1, "›", "Version after")];
  }

  /** Lets the user change a message in its place. */
  #edit(node, shown) {
    const before = document.activeElement; // gets the focus back
    const field = element("textarea");
    const text = textOf(node.message.content);
    const isUsers = node.message.role === "user";
    Object.assign(field, { value: text, dir: "auto", ariaLabel: isUsers ? "Message" : "Answer" });
    const close = () => {
      form.remove();
      shown.hidden = !text;
      before.focus();
    };
    const save = element("button", "primary", isUsers ? "Send" : "Save");
    const actions = element("div", "actions", "", tool("Cancel", () => close()), save);
    const form = element("form", "edit", "", field, actions);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      event.stopPropagation(); // it is not the form of a tool's results
      close();
      if (field.value.trim() && field.value !== text)
        this.#actions.edit(node, contentOf(field.value, picturesOf(node.message.content)));
    });
    form.addEventListener("keydown", (event) => {
      const sends = event.key === "Enter" && (event.ctrlKey || event.metaKey);
      if (event.key === "Escape" || sends) event.stopPropagation(); // an answer that is coming goes on
      if (event.key === "Escape") close();
      if (sends) form.requestSubmit();
    });
    shown.hidden = true;
    shown.after(form);
    field.focus();
  }
}
