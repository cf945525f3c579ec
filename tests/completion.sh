#!/bin/bash
# Checks the bash completion, and that help, completion and the manual page have the same options. The command is
# $RESHARD.
cd "$(dirname "$0")/.." || exit 1
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
ln -s "${RESHARD:?where is the command?}" "$bin/reshard"
PATH=$bin:$PATH
# shellcheck source=completion/reshard.bash
. completion/reshard.bash
n=0 failed=0

# offers LINE PATTERN: the completions of the last word of the line, one space apart, match the pattern.
offers()
{
    local line=$1
    read -ra COMP_WORDS <<< "$line"
    case $line in *" ") COMP_WORDS+=("") ;; esac
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _reshard
    n=$((n + 1))
    # shellcheck disable=SC2053
    if [[ "${COMPREPLY[*]}" == $2 ]]; then
        echo "ok $n - '$line'"
    else
        echo "not ok $n - '$line' offers '${COMPREPLY[*]}', not '$2'"
        failed=1
    fi
}

offers "reshard in" "inspect"
offers "reshard d" "diff digest"
offers "reshard-mpi " "convert merge split verify diff digest --help --version"
offers "reshard merge --con" "--config-from"
offers "reshard split --form" ""
offers "reshard convert --preset l" "llama-tp"
offers "reshard convert --mesh " ""
offers "reshard verify tests/gold" "tests/golden"
offers "reshard inspect tests/golden/fsdp2_adamw/ckpt model.up." "model.up.weight model.up.bias"
offers "reshard extract --cast f32 tests/golden/fsdp2_adamw/ckpt model.down.w" "model.down.weight"
offers "reshard inspect no/such/checkpoint " ""
offers "reshard inspect README.md m" ""
offers "reshard verify --no-s" "--no-sign-request"

# same LABEL A B: both lists have the same lines.
same()
{
    n=$((n + 1))
    if [ "$2" = "$3" ] && [ -n "$2" ]; then
        echo "ok $n - $1"
    else
        echo "not ok $n - $1"
        diff <(echo "$2") <(echo "$3") | sed 's/^/# /'
        failed=1
    fi
}

# The options that the manual page describes, of all verbs.
manual=$(sed -n 's/^\.BR* .*\(\\-\\-[a-z0-9\\-]*\).*/\1/p; s/^\.BI \(\\-\\-[a-z0-9\\-]*\).*/\1/p' man/reshard.1 | tr -d '\\' | sort -u)
all=
for verb in inspect plan convert merge split verify diff digest extract uploads; do
    help=$(reshard $verb --help | grep -o -- '^ *\(-.,\)* *--[a-z0-9-]*' | grep -o -- '--.*' | sort -u)
    same "options of $verb" "$help" "$(_reshard_options $verb | tr -s ' ' '\n' | sort -u)"
    all="$all $help"
done
help=$(reshard --help | grep -o -- "^ *--[a-z-]*" | grep -o -- "--.*" | sort -u)
same "options for URLs" "$help" "$(sed -n 's/.*local urls="\(.*\)"/\1/p' completion/reshard.bash | tr " " "\n" | sort -u)"
all="$all $help"
same "options of the manual page" "$(echo $all --version | tr ' ' '\n' | sort -u)" "$manual"
presets=$(reshard convert a b --preset none 2>&1 | sed 's/.*presets are //; s/;.*//; s/,//g')
plain() { echo "$*" | sed 's/fsdp+[^ ]* //g'; } # fsdp+NAME is offered for each NAME with -tp
COMP_WORDS=(reshard convert --preset "") COMP_CWORD=3
_reshard
same "presets in bash" "$presets" "$(plain "${COMPREPLY[@]}")"
same "presets in zsh" "$presets" "$(plain "$(sed -n 's/.*:preset:(\(.*\)).*/\1/p' completion/_reshard)")"
same "presets in help" "$presets" "$(reshard convert --help | sed -n '/built-in rules: /,/;/p' | tr '\n' ' ' |
    sed 's/.*built-in rules: //; s/;.*//; s/,//g; s/ or / /' | tr -s ' ')"
echo "1..$n"
exit $failed
