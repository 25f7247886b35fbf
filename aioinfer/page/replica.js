// Behind a gateway: of which replica the panel is.

import { request } from "./api.js";

/** Says of which replica the engines are, behind a gateway, and of how many it is one. */
export async function showReplica(name) {
  const line = document.getElementById("replica");
  line.hidden = name === null;
  if (name === null) return;
  line.textContent = `Replica ${name}`;
  try {
    const { replicas } = await (await request("/health/ready")).json();
    line.textContent += `, one of ${replicas}; an answer may come from any of them`;
  } catch {
    // how many there are is not worth a word to the user
  }
}
