// Changes the sampling rate of a stream of samples, piece by piece.

const ZEROS = 24; // zero crossings of the filter on each side
const PASSED = 0.94; // of the lower rate's bandwidth; the rest is the filter's slope

/** A windowed-sinc filter at each of the positions that output samples have between two input samples. */
export class Resampler {
  /** Rates in Hz, whole numbers. */
  constructor(source, target) {
    const divisor = greatestCommonDivisor(source, target);
    this.from = source / divisor;
    this.to = target / divisor;
    this.reach = Math.ceil((ZEROS * Math.max(source, target)) / target); // input samples on each side of an output sample
    this.filters = Array.from({ length: this.to }, (_, phase) => this.filter(phase / this.to));
    this.kept = new Float32Array(this.reach); // input that later output needs; silence before the first sample
    this.phase = 0; // of the next output sample, in `to`ths of an input sample beyond this.reach
  }

  /** The output samples (Float32Array) that are known once these input samples are. */
  take(samples) {
    if (this.from === this.to) return samples.slice();
    const input = new Float32Array(this.kept.length + samples.length);
    input.set(this.kept);
    input.set(samples, this.kept.length);
    const last = input.length - this.reach - 1; // the centre of the last output sample
    const known = Math.max(0, Math.floor(((last - this.reach + 1) * this.to - 1 - this.phase) / this.from) + 1);
    const output = new Float32Array(known);
    for (let index = 0; index < known; index++) {
      const filter = this.filters[this.phase % this.to];
      const first = Math.floor(this.phase / this.to); // this.reach before the centre
      let sum = 0;
      for (let tap = 0; tap < filter.length; tap++) sum += filter[tap] * input[first + tap];
      output[index] = sum;
      this.phase += this.from;
    }
    const done = Math.min(Math.floor(this.phase / this.to), input.length);
    this.phase -= done * this.to;
    this.kept = input.slice(done);
    return output;
  }

  /** Weights of 2 x reach + 1 input samples for an output sample at `offset` (0 to 1) behind the middle one. */
  filter(offset) {
    const bandwidth = Math.min(1, this.to / this.from) * PASSED;
    const weights = Float64Array.from({ length: 2 * this.reach + 1 }, (_, tap) => {
      const distance = tap - this.reach - offset;
      const place = distance / (this.reach + 1);
      const window = 0.42 + 0.5 * Math.cos(Math.PI * place) + 0.08 * Math.cos(2 * Math.PI * place); // Blackman's
      const angle = Math.PI * distance * bandwidth;
      return window * (angle === 0 ? 1 : Math.sin(angle) / angle);
    });
    const sum = weights.reduce((one, other) => one + other);
    return Float32Array.from(weights, (weight) => weight / sum);
  }
}

function greatestCommonDivisor(one, other) {
  return other === 0 ? one : greatestCommonDivisor(other, one % other);
}
