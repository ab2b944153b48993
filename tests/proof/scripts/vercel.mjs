// Vercel's default provider, which uses Responses: node vercel.mjs URL MODEL QUESTION ANSWER.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const [url, model, question, answer] = process.argv.slice(2);
const provider = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const calls = [];
const number = { type: "integer" };
const add = tool({
  description: "Add two numbers.",
  inputSchema: jsonSchema({
    type: "object",
    properties: { a: number, b: number },
    required: ["a", "b"],
    additionalProperties: false,
  }),
  execute: async ({ a, b }) => {
    calls.push([a, b]);
    return a + b;
  },
});
const common = { tools: { add }, stopWhen: stepCountIs(4), maxRetries: 0 };
const unstored = { providerOptions: { openai: { store: false } } };

// Two turns, the first with a tool round: the default provider with store false, and .chat().
for (const given of [{ model: provider(model), ...unstored }, { model: provider.chat(model) }]) {
  const messages = [];
  for (const ask of [generateText, (options) => streamText(options)]) {
    messages.push({ role: "user", content: question });
    const result = await ask({ ...given, ...common, messages });
    assert.equal(await result.text, answer);
    assert.deepEqual(calls.splice(0), messages.length === 1 ? [[2, 3]] : []);
    messages.push(...(await result.response).messages);
  }
}

// Without store false, the second turn refers to items that the server has not stored.
const first = await generateText({ model: provider(model), maxRetries: 0, prompt: "Hello" });
const second = generateText({
  model: provider(model),
  maxRetries: 0,
  messages: [
    { role: "user", content: "Hello" },
    ...first.response.messages,
    { role: "user", content: "Hello" },
  ],
});
await assert.rejects(second, /store set to false/);
console.log("ai, @ai-sdk/openai");
