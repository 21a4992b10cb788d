// Reads KEDA manifests as a JSON list on standard input, and prints what their schemas say against each.
// argv[2]: folder into which the models were installed.
import { pathToFileURL } from "node:url";

const models = `${process.argv[2]}/node_modules/@kubernetes-models/keda`;
const found = [];
let text = "";
for await (const part of process.stdin) text += part;
for (const manifest of JSON.parse(text)) {
  const file = pathToFileURL(`${models}/${manifest.apiVersion}/${manifest.kind}.js`);
  const { [manifest.kind]: Model } = await import(file);
  try {
    new Model(manifest).validate();
  } catch (error) {
    found.push(`${manifest.kind}/${manifest.metadata?.name}: ${error.message}`);
  }
}
console.log(JSON.stringify(found));
