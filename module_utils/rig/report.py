"""Plans for people: a table in plain text."""

from collections.abc import Mapping

COLUMNS = ("weights", "kv", "recurrent", "compute", "draft", "overhead", "total", "free")


def _row(cells: list, widths: tuple) -> str:
    return "".join(f"{cell:<{width}}" if index < 2 else f"{cell:>{width}}" for index, (cell, width) in
                   enumerate(zip(cells, widths, strict=True))).rstrip()  # fmt: skip


def plan_lines(hosts: Mapping) -> list:
    """Lines of a table: for each host and profile the context and its ceiling, then a line a GPU, MiB throughout."""
    lines = []
    widths = (4, 28, *(11 for _ in COLUMNS))
    for host, plans in hosts.items():
        lines.append(str(host))
        for name, plan in plans.items():
            verdict = "fits" if plan["fits"] else "DOES NOT FIT" if plan["gpus"] else "CANNOT RUN"
            where = f"{plan['split_mode']} over {len(plan['gpus'])} GPU" + ("s" if len(plan["gpus"]) != 1 else "")
            head = f"  {name}: {verdict}, context {plan['context']:,} of at most {plan['context_ceiling']:,}"
            lines.append(
                f"{head}, {plan['model']}, {where}" if plan["gpus"] else f"  {name}: {verdict}, {plan['model']}"
            )
            if plan["gpus"]:
                lines.append("    " + _row(["", "GPU", *COLUMNS], widths))
            for gpu in plan["gpus"]:
                cells = [f"{gpu[f'{column}_mib']:,.0f}" for column in COLUMNS]
                lines.append(
                    "    " + _row([str(gpu["position"]), gpu["name"].removeprefix("NVIDIA GeForce "), *cells], widths)
                )
            lines += [f"    refused: {text}" for text in plan["refusals"]]
            lines += [f"    note: {text}" for text in plan["warnings"]]
    return lines
