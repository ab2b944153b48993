// Anthropic's tool runner for TypeScript: node tool_runner.mjs URL MODEL QUESTION ANSWER.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";

const [url, model, question, answer] = process.argv.slice(2);
const calls = [];
const number = { type: "integer" };
const add = betaTool({
  name: "add",
  description: "Add two numbers.",
  inputSchema: { type: "object", properties: { a: number, b: number }, required: ["a", "b"] },
  run: ({ a, b }) => {
    calls.push([a, b]);
    return String(a + b);
  },
});
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: question }];
for (const stream of [false, true]) {
  const last = await client.beta.messages.toolRunner({
    model,
    max_tokens: 64,
    tools: [add],
    messages,
    stream,
  }).runUntilDone();
  const text = last.content.filter((block) => block.type === "text").map((block) => block.text);
  assert.deepEqual([calls.splice(0), text.join("")], [[[2, 3]], answer]);
}
console.log("@anthropic-ai/sdk (tool runner)");
