// Four worker threads hash, sort and compress; timers, the thread pool and a child process go along.
const { Worker, isMainThread, parentPort, workerData } = require('worker_threads');
const crypto = require('crypto');

function work(id, step) {
  const words = new Uint32Array(20000);
  let x = (id * 7919 + step) >>> 0;
  for (let i = 0; i < words.length; i++) {
    x = (Math.imul(x, 1664525) + 1013904223) >>> 0;
    words[i] = x;
  }
  const objects = [];
  for (let i = 0; i < 3000; i++) objects.push({ key: 'k' + (words[i] % 1000), value: words[i] });
  objects.sort((a, b) => a.value - b.value);
  words.sort();
  return crypto.createHash('sha256').update(JSON.stringify(objects)).update(words).digest('hex');
}

if (!isMainThread) {
  const shared = new Int32Array(workerData.memory);
  parentPort.on('message', (step) => {
    const hash = work(workerData.id, step);
    Atomics.add(shared, workerData.id, 1);
    parentPort.postMessage(hash);
  });
} else {
  const fs = require('fs');
  const zlib = require('zlib');
  const { spawn } = require('child_process');
  const memory = new SharedArrayBuffer(64);
  const counts = new Int32Array(memory);
  const workers = [0, 1, 2, 3].map((id) => new Worker(__filename, { workerData: { id, memory } }));
  const child = spawn('cat');
  const once = (emitter, event) => new Promise((resolve) => emitter.once(event, resolve));
  const squeeze = (text) =>
    new Promise((resolve, reject) =>
      zlib.gzip(text, (error, bytes) => (error ? reject(error) : resolve(bytes))));
  let ticks = 0;
  setInterval(() => ticks++, 5);
  (async () => {
    for (let step = 1; ; step++) {
      const answers = workers.map((worker) => once(worker, 'message'));
      workers.forEach((worker) => worker.postMessage(step));
      const hashes = await Promise.all(answers);
      const back = once(child.stdout, 'data');
      child.stdin.write(hashes.join());
      const packed = await squeeze((await back).toString().repeat(50));
      if (zlib.gunzipSync(packed).toString() !== hashes.join().repeat(50)) process.exit(3);
      if (counts.slice(0, 4).some((count) => count !== step)) process.exit(4);
      const hash = crypto.createHash('sha256').update(hashes.join()).digest('hex');
      fs.appendFileSync('steps', `${step} ${hash}\n`);
      if (fs.existsSync('stop')) process.exit(ticks > 0 ? 0 : 5);
    }
  })();
}
