// Recomputes the published results.
import { load } from './mha.js';

const element = (id) => document.getElementById(id);
const mha = await load();
const module = mha.instructionSet === 'wasmSimd128' ? 'mha_simd128' : 'mha';
element('set').textContent = mha.instructionSet;
element('version').textContent = `${mha.version}, contract ${mha.contract}`;

function recompute() {
  element('run').disabled = true;
  element('state').textContent = 'computing ...';
  element('cells').replaceChildren();
  const worker = new Worker('results.js', { type: 'module' });
  const finish = (text, state) => {
    element('state').textContent = text;
    document.body.dataset.state = state;
    element('run').disabled = false;
    worker.terminate();
    const body = `${text}; ${mha.instructionSet}`;
    if (location.hash === '#run') fetch('/', { method: 'POST', body });
  };
  worker.onerror = (event) => finish(`It fails: ${event.message ?? 'see the console'}`, 'bad');
  worker.onmessage = ({ data: { results, seconds } }) => {
    element('cells').replaceChildren(...results.map(({ name, agrees }) => {
      const cell = document.createElement('i');
      cell.title = name;
      cell.className = agrees ? 'good' : 'bad';
      return cell;
    }));
    const good = results.filter(({ agrees }) => agrees).length;
    finish(`${good} of ${results.length} results agree, bit for bit, in ${seconds.toFixed(1)} s`,
      good === results.length ? 'good' : 'bad');
  };
  worker.postMessage(`results_${module}.wasm`);
}
element('run').onclick = recompute;
if (location.hash === '#run') recompute();
