"""Renders cases.json with Python's jinja2 in the environment that Hugging Face's tokenizers set up, and writes
expected.json. Run it again after a change to a template or a case:

    python3 -m pip install jinja2==3.1.6 && python3 generate.py
"""

import datetime
import json
import pathlib

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = pathlib.Path(__file__).parent


class Generation(jinja2.ext.Extension):
    """{% generation %}…{% endgeneration %}: rendered as if the tags were not there."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


class Refused(Exception):
    pass


def environment(time):
    def raise_exception(message):
        raise Refused(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def strftime_now(form):
        return datetime.datetime.fromtimestamp(time, datetime.timezone.utc).replace(tzinfo=None).strftime(form)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


def prepared(message):
    """What an engine does to messages before the template sees them."""
    message = dict(message)
    if message.get("content") is None:
        message["content"] = ""
    for call in message.get("tool_calls") or []:
        function = call["function"]
        if isinstance(function["arguments"], str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except json.JSONDecodeError:
                continue
            if isinstance(arguments, dict):
                function["arguments"] = arguments
    return message


def main():
    spec = json.loads((HERE / "cases.json").read_text(encoding="utf-8"))
    env = environment(spec["time"])
    results = {}
    for case in spec["cases"]:
        template = env.from_string((HERE / f"{case['template']}.jinja").read_text(encoding="utf-8"))
        variables = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": False,
            "bos_token": case.get("bos", ""),
            "eos_token": case.get("eos", ""),
            "messages": [prepared(m) for m in case["messages"]],
        } | case["extra"]
        try:
            results[case["name"]] = {"text": template.render(**variables)}
        except Refused as refused:
            results[case["name"]] = {"raised": str(refused)}
    text = json.dumps(results, ensure_ascii=False, indent=1) + "\n"
    (HERE / "expected.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
