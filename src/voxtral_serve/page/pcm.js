/** A sample of -1 to 1 as one of PCM16. Browsers that decode a 16-bit file divide so, and get its samples back so. */
export function pcm16(sample) {
  return Math.max(-32768, Math.min(32767, Math.round(sample * (sample < 0 ? 32768 : 32767))));
}
