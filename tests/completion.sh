#!/bin/bash
# What bash offers after a few beginnings of a line, with the command in $RESHARD on the path.
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

# Every option that --help names is offered, and none that it does not name.
for verb in inspect convert merge split verify diff digest extract; do
    n=$((n + 1))
    says=$(reshard $verb --help | grep -o -- '^ *\(-.,\)* *--[a-z-]*' | grep -o -- '--.*' | sort)
    has=$(_reshard_options $verb | tr -s ' ' '\n' | sort)
    if [ "$says" = "$has" ]; then
        echo "ok $n - options of $verb"
    else
        echo "not ok $n - options of $verb"
        diff <(echo "$says") <(echo "$has") | sed 's/^/# /'
        failed=1
    fi
done
echo "1..$n"
exit $failed
