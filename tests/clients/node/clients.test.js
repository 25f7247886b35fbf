// openai, Vercel's ai and langchain for node. test_node.py runs this with the server's address in AIOINFER_URL.
import assert from "node:assert/strict";
import test from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { ChatOpenAI } from "@langchain/openai";
import { generateObject, generateText, streamObject, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const baseURL = `${process.env.AIOINFER_URL}/v1`;
const model = process.env.AIOINFER_MODEL;
const question = "What is the weather in Paris for the next three days?";
const messages = [{ role: "user", content: question }];
const Weather = z.strictObject({ city: z.enum(["Paris", "Rome"]), days: z.int().min(1).max(9) });
const tools = [
  { type: "function", function: { name: "get_weather", parameters: z.toJSONSchema(Weather) } },
];
const short = { model, messages, temperature: 0, max_tokens: 64 };
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });

test("openai: chats", async () => {
  const whole = await client.chat.completions.create(short);
  const text = whole.choices[0].message.content;
  assert.ok(text && whole.usage.completion_tokens > 1);
  let streamed = "";
  const stream = await client.chat.completions.create({ ...short, stream: true });
  for await (const chunk of stream) streamed += chunk.choices[0]?.delta.content ?? "";
  assert.equal(streamed, text);
});

test("openai: calls and objects", async () => {
  const options = { ...short, tools, tool_choice: "required", parallel_tool_calls: false };
  const reply = await client.chat.completions.create(options);
  const [call] = reply.choices[0].message.tool_calls;
  Weather.parse(JSON.parse(call.function.arguments));
  const helper = client.chat.completions.stream(options);
  const [streamed] = (await helper.finalMessage()).tool_calls;
  assert.equal(streamed.function.arguments, call.function.arguments);
  const format = zodResponseFormat(Weather, "weather");
  const parsed = await client.chat.completions.parse({ ...short, response_format: format });
  Weather.parse(parsed.choices[0].message.parsed);
});

test("openai: completions, embeddings, Responses, errors", async () => {
  const prompt = "The capital of France is";
  const made = await client.completions.create({ model, prompt, max_tokens: 4, logprobs: 2 });
  assert.equal(made.choices[0].logprobs.tokens.length, 4);
  const { data } = await client.embeddings.create({ model, input: ["a river", "a stream"] });
  assert.equal(data.length, 2);
  assert.ok(data[0].embedding.length > 1);
  const response = await client.responses.create({ model, input: question, max_output_tokens: 16 });
  assert.ok(response.output_text);
  const long = { ...short, messages: [{ role: "user", content: "river ".repeat(9000) }] };
  await assert.rejects(client.chat.completions.create(long), (error) => {
    return error instanceof OpenAI.BadRequestError && error.code === "context_length_exceeded";
  });
});

test("ai: text, calls, objects", async () => {
  const provider = createOpenAICompatible({
    name: "aioinfer",
    baseURL,
    includeUsage: true,
    supportsStructuredOutputs: true,
  });
  const asked = { model: provider(model), prompt: question, temperature: 0, maxOutputTokens: 64 };
  const whole = await generateText(asked);
  assert.ok(whole.text && whole.usage.outputTokens > 1);
  const stream = streamText(asked);
  let streamed = "";
  for await (const piece of stream.textStream) streamed += piece;
  assert.equal(streamed, whole.text);
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  const weather = tool({ inputSchema: Weather, execute: async ({ city }) => `sun in ${city}` });
  const calls = { ...asked, tools: { weather }, toolChoice: { type: "tool", toolName: "weather" } };
  const called = await generateText(calls);
  Weather.parse(called.toolCalls[0].input);
  assert.match(called.toolResults[0].output, /^sun in/);
  const calling = streamText(calls);
  Weather.parse((await calling.toolCalls)[0].input);
  assert.match((await calling.toolResults)[0].output, /^sun in/);
  assert.equal(await calling.finishReason, "tool-calls");
  const { object } = await generateObject({ ...asked, schema: Weather });
  Weather.parse(object);
  const partial = streamObject({ ...asked, schema: Weather });
  let last;
  for await (const piece of partial.partialObjectStream) last = piece;
  assert.deepEqual(last, object);
});

test("langchain: text, calls, objects", async () => {
  const chat = new ChatOpenAI({
    model,
    apiKey: "none",
    maxTokens: 64,
    temperature: 0,
    maxRetries: 0,
    configuration: { baseURL },
  });
  const whole = await chat.invoke(question);
  assert.ok(whole.content && whole.usage_metadata.output_tokens > 1);
  let streamed = "";
  for await (const chunk of await chat.stream(question)) streamed += chunk.content;
  assert.equal(streamed, whole.content);
  const options = { tool_choice: "get_weather", parallel_tool_calls: false };
  const { tool_calls } = await chat.bindTools(tools, options).invoke(question);
  Weather.parse(tool_calls[0].args);
  let joined;
  for await (const chunk of await chat.bindTools(tools, options).stream(question))
    joined = joined ? joined.concat(chunk) : chunk;
  assert.deepEqual(joined.tool_calls[0].args, tool_calls[0].args);
  for (const method of ["jsonSchema", "functionCalling"]) {
    const structured = chat.withStructuredOutput(Weather, { name: "weather", method });
    Weather.parse(await structured.invoke(question));
  }
});
