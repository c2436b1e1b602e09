"use strict";
const at = (id) => document.getElementById(id);
let messages = [], going = null, model = "";

async function begin() {
  const answer = await (await fetch("privacy")).json();
  model = answer.model;
  document.title = model;
  at("model").textContent = model;
  at("reader").textContent = answer.reader;
}

function show(role, text) {
  const line = document.createElement("p");
  line.className = role;
  line.textContent = text;
  at("messages").append(line);
  line.scrollIntoView({ block: "end" });
  return line;
}

async function* pieces(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function ask(text) {
  messages.push({ role: "user", content: text });
  show("user", text);
  going = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  const line = show("assistant", "");
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      signal: going.signal,
      headers: { "Content-Type": "application/json", Authorization: "Bearer " + at("key").value.trim() },
      body: JSON.stringify({
        model, messages, stream: true,
        temperature: Number(at("temperature").value), max_tokens: Number(at("tokens").value),
      }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const piece of pieces(response)) {
      if (piece.error) throw new Error(piece.error.message);
      line.textContent += piece.choices[0]?.delta.content ?? "";
    }
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  } finally {
    if (line.textContent) messages.push({ role: "assistant", content: line.textContent });
    else { line.remove(); messages.pop(); }
    at("send").disabled = false;
    at("stop").disabled = true;
  }
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || at("send").disabled) return;
  at("text").value = "";
  ask(text);
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); at("form").requestSubmit(); }
});
at("stop").addEventListener("click", () => going?.abort());
at("new").addEventListener("click", () => { messages = []; at("messages").replaceChildren(); });
begin();
