// What a page in headless Chromium posts to its server: `posted(FOLDER, PAGE, FLAG...)`, which this
// file prints as a program with these arguments.
import { spawn } from 'node:child_process';
import fs from 'node:fs';
import http from 'node:http';
import path from 'node:path';

const types = { '.html': 'text/html', '.js': 'text/javascript', '.wasm': 'application/wasm' };
const programs = process.env.PATH.split(':').map((folder) => path.join(folder, 'chromium'));
export const chromium = programs.find((file) => fs.existsSync(file));

export async function posted(folder, page = '', ...flags) {
  let answer;
  const server = http.createServer(async (request, response) => {
    const file = path.join(folder, request.url.replace(/\/$/, '/index.html'));
    if (request.method === 'POST') answer((await request.toArray()).join(''));
    else if (!fs.existsSync(file)) response.writeHead(404);
    else response.setHeader('content-type', types[path.extname(file)] ?? 'text/plain')
      .write(fs.readFileSync(file));
    response.end();
  });
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  const words = ['--headless', '--no-sandbox', '--disable-gpu', ...flags,
    `http://127.0.0.1:${server.address().port}/${page}`];
  const browser = spawn(chromium, words, { stdio: 'ignore', timeout: 120e3 });
  try {
    return await new Promise((resolve, reject) => {
      answer = resolve;
      browser.on('exit', () => reject(Error('Chromium posts nothing')));
    });
  } finally {
    browser.kill();
    server.close();
    server.closeAllConnections();
  }
}

if (process.argv[1] === import.meta.filename) console.log(await posted(...process.argv.slice(2)));
