// The stock Node client against the service at argv[2]: prints what it found as JSON.
import OpenAI, { toFile } from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: process.argv[4] });
const model = process.argv[3];
const endpoint = "/v1/chat/completions";
const body = { model, messages: [{ role: "user", content: "hello" }], max_tokens: 4 };
const line = (custom_id, more = {}) => JSON.stringify({ custom_id, method: "POST", url: endpoint, body, ...more });
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

async function upload(lines) {
  const content = Buffer.from(lines.join("\n") + "\n");
  return client.files.create({ file: await toFile(content, "in.jsonl"), purpose: "batch" });
}

async function ended(batch) {
  while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
    await pause(50);
    batch = await client.batches.retrieve(batch.id);
  }
  return batch;
}

async function statusOf(call) {
  try {
    await call();
  } catch (error) {
    return { status: error.status, type: error.type, param: error.param, code: error.code, name: error.constructor.name };
  }
  return null;
}

const file = await upload([line("a"), line("b")]);
const asked = { input_file_id: file.id, endpoint, completion_window: "24h", metadata: { x: "y" } };
const batch = await ended(await client.batches.create(asked));
const text = await (await client.files.content(batch.output_file_id)).text();
await client.batches.create(asked);
const listed = [];
for await (const one of client.batches.list({ limit: 2 })) listed.push(one.id);
const files = [];
for await (const one of client.files.list({ limit: 2, purpose: "batch" })) files.push(one.id);
const bad = await ended(await client.batches.create({ ...asked, input_file_id: (await upload([line("a", { url: "/x" })])).id }));
const models = [];
for await (const one of client.models.list()) models.push(one.id);
const deleted = await client.files.delete(file.id);
console.log(
  JSON.stringify({
    batch,
    ids: text.trim().split("\n").map((one) => JSON.parse(one).custom_id),
    listed,
    files,
    file,
    bad,
    models,
    deleted,
    missing: await statusOf(() => client.batches.retrieve("batch_x")),
    gone: await statusOf(() => client.files.retrieve(file.id)),
    wrong: await statusOf(() => client.batches.create({ ...asked, endpoint: "/v1/x" })),
    late: await statusOf(() => client.batches.cancel(batch.id)),
  }),
);
