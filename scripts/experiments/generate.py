"""Complete some prompts, together in one batch, and print what comes out."""

from __future__ import annotations

import time
from pathlib import Path

from octavo.core.inspection.page_watch import PageWatch
from octavo.scripts import build, report
from octavo.scripts.progress import console, waiting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Run
from octavo.scripts.schema import Generate


def run(config: Generate, run: Run) -> None:
    """One sample a prompt and continuation; one row for the batch."""
    from octavo.core import BatchError

    prompts = _prompts(config)
    method = build.method(config.method, budget_tokens=config.budget_tokens)
    with waiting(f"loading {config.model.path}"):
        model, tokenizer = build.load_model(config.model)
        engine = build.engine(config, model, tokenizer)
        build.fit({config.method: method}, engine)
    engine.watch = PageWatch() if config.page_map else None

    start = time.perf_counter()
    ids: dict[str, int] = {}
    refused: dict[int, Exception] = {}
    for index, prompt in enumerate(prompts):
        try:
            ids[engine.submit(prompt, build.sampling_params(config.sampling), method=method)] = index
        except ValueError as error:
            refused[index] = error
    completions = engine.finish(list(ids))
    seconds = time.perf_counter() - start

    done = run.done("item", "sample")
    for request_id, completion in completions.items():
        index = ids[request_id]
        for number, sample in enumerate(completion.samples):
            console.print(f"\n[{index}] {prompts[index]}", style="dim", markup=False, highlight=False)
            console.print(sample.text, markup=False, highlight=False)
            if (index, number) not in done:
                run.add(
                    {
                        "item": index,
                        "sample": number,
                        "method": config.method,
                        "prompt": prompts[index],
                        "prompt_tokens": len(completion.prompt_token_ids),
                        "cached_tokens": completion.cached_tokens,
                        "output": sample.text,
                        "new_tokens": len(sample.token_ids),
                        "finish_reason": sample.finish_reason,
                        "decode_steps": sample.decode_steps,
                        "kv_bytes_read": sample.kv_bytes_read,
                        "digest_bytes_read": sample.digest_bytes_read,
                        "extra_tokens": sample.extra_tokens,
                    }
                )
    samples = [sample for completion in completions.values() for sample in completion.samples]
    new_tokens, steps = sum(len(s.token_ids) for s in samples), sum(s.decode_steps for s in samples)
    stats = engine.stats()
    row = {
        "name": "octavo",
        "method": config.method,
        "prompts": len(completions),
        "new_tokens": new_tokens,
        "kv_bytes_per_token": sum(s.kv_bytes_read for s in samples) / steps if steps else None,
        "units_held_peak": stats.units_held_peak,
        "device_bytes_peak": stats.device_bytes_peak,
        "seconds": seconds,
        "tokens_per_s": new_tokens / seconds,
    }
    report.publish(run, config, [row], plots={}, maps=[("all prompts, in one batch", engine.watch)])
    if refused:
        ordered = [next((c for r, c in completions.items() if ids[r] == i), None) for i in range(len(prompts))]
        raise BatchError(ordered, refused)


def _prompts(config: Generate) -> list[str]:
    prompts = list(config.prompts)
    if config.prompts_file is not None:
        file = Path(config.prompts_file)
        try:
            prompts += [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"prompts_file cannot be read: {file}: {error}") from error
    if not prompts:
        raise ConfigError("there are no prompts; give some with prompts=[...] or prompts_file=FILE")
    return prompts[: config.limit]
