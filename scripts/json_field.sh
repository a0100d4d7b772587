# Sourced: reads JSON in shell scripts. `python` is the interpreter.
field() { # EXPRESSION: of the JSON on standard input, called `it`; fails where there is none
    "$python" -c "import json, sys; text = sys.stdin.read(); it = json.loads(text) if text else sys.exit(1); print($1)"
}
