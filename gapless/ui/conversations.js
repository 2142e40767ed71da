/** Conversations of the chat, kept in this browser only: one entry of its storage each. */

const PREFIX = "gapless-chat-";
const MOST = 100;
const TITLE = 60;

/**
 * @typedef {{role: string, content: string, reasoning?: string, tool_calls?: any[], cost?: string}} Message
 * @typedef {{id: string, at: number, messages: Message[]}} Conversation
 */

/** All of them, newest first. @returns {Conversation[]} */
export function conversations() {
  const found = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX)).map(read).filter((one) => one !== null);
  return found.sort((one, other) => other.at - one.at);
}

/** @returns {Conversation} */
export function newConversation() {
  return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), at: Date.now(), messages: [] };
}

/** Keep a conversation as it is now; without messages there is nothing to keep. The oldest ones make room for it. */
export function keep(conversation) {
  if (!conversation.messages.length) return forget(conversation);
  conversation.at = Date.now();
  const others = conversations().filter(({ id }) => id !== conversation.id);
  for (const old of others.splice(MOST - 1)) forget(old);
  for (;;) {
    try {
      localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
      return;
    } catch (error) { // the storage is full
      const oldest = others.pop();
      if (!oldest) throw new Error(`this browser keeps no more: ${error.message}`);
      forget(oldest);
    }
  }
}

export function forget({ id }) {
  localStorage.removeItem(PREFIX + id);
}

/** Its first words. */
export function titleOf({ messages }) {
  const text = messages.find(({ role }) => role === "user")?.content.trim().replaceAll(/\s+/g, " ") ?? "";
  return text.length > TITLE ? `${text.slice(0, TITLE)}…` : text || "New chat";
}

function read(key) {
  try {
    const one = JSON.parse(localStorage.getItem(key) ?? "");
    return Array.isArray(one.messages) && typeof one.id === "string" ? one : null;
  } catch { // not one of ours
    return null;
  }
}
