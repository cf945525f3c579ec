# bash completion for reshard: verbs, the options of each verb, files, and tensor names.

# Prints the tensor names of a checkpoint. Opening one reads names and shapes only. On any error nothing is
# offered, since completion must not print messages.
_reshard_tensors()
{
    [ -e "$2" ] || return
    timeout 5 "$1" inspect --json -- "$2" 2>/dev/null |
        sed -n -e '/"values": \[/q' -e 's/.*{"name": "\([^"\\]*\)", "dtype".*/\1/p'
}

_reshard_options()
{
    local input="--follow-links --as-is --take-rank-0 --dtype --unstack --vocab-size --from --from-mesh
        --names --heads"
    local target="--mesh --place --rules --preset --replicate-kv-heads --default"
    local common="--only --exclude --rename --strip-prefix --cast --max-memory --threads --dry-run --estimate
        --resume --verify --force --reflink --unchecked --torch-places --json --quiet --help $input"
    case $1 in
    inspect) echo "--json --only --tree --svg --html --help $input" ;;
    plan) echo "--json --pairs --ranks --pieces --rank --ranks-per-node --no-picture --svg --html
        --format --compress --max-shard-size $target $common" ;;
    convert) echo "--format --compress --max-shard-size $target $common" ;;
    merge) echo "--max-shard-size --all --config-from $common" ;;
    split) echo "--config-from $target $common" ;;
    verify) echo "--json --max-memory --threads --quiet --help $input" ;;
    diff) echo "--rtol --atol --rename --only --json --max-memory --threads --quiet --help $input" ;;
    digest) echo "--only --json --max-memory --threads --quiet --help $input" ;;
    extract) echo "--slice --only --cast --raw --force --help $input" ;;
    names) echo "--help" ;;
    uploads) echo "--remove --help" ;;
    esac
}

_reshard()
{
    local verbs="inspect plan convert merge split verify diff digest extract names uploads"
    [[ ${COMP_WORDS[0]} == *reshard-mpi ]] && verbs="convert merge split verify diff digest"
    local takes=" --from-mesh --format --mesh --place --rules --preset --default --compress --max-shard-size --only
        --exclude --rename --strip-prefix --cast --max-memory --threads --config-from --svg --html --rank
        --ranks-per-node --slice --rtol --atol --dtype --vocab-size --from --names --heads --endpoint-url --region
        --profile --ca-bundle --reflink "
    local urls="--endpoint-url --region --profile --ca-bundle --no-sign-request"
    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} verb=${COMP_WORDS[1]}
    local i count=0 checkpoint=
    takes=${takes//[[:space:]]/ }
    COMPREPLY=()

    if ((COMP_CWORD == 1)); then
        mapfile -t COMPREPLY < <(compgen -W "$verbs --help --version" -- "$current")
        return
    fi
    case $before in
    --format) mapfile -t COMPREPLY < <(compgen -W "dcp safetensors torch.save fsdp" -- "$current") ;;
    --preset) mapfile -t COMPREPLY < <(compgen -W "fsdp hsdp llama-tp moe-tp qwen-tp gpt2-tp bert-tp fsdp+llama-tp fsdp+moe-tp fsdp+qwen-tp fsdp+gpt2-tp fsdp+bert-tp replicate" -- "$current") ;;
    --compress) mapfile -t COMPREPLY < <(compgen -W "none zstd" -- "$current") ;;
    --dtype) mapfile -t COMPREPLY < <(compgen -W "model" -- "$current") ;;
    --cast) mapfile -t COMPREPLY < <(compgen -W "bf16 f16 f32 f64" -- "$current") ;;
    --names) mapfile -t COMPREPLY < <(compgen -f -W "megatron-llama fused-llama" -- "$current") ;;
    --reflink) mapfile -t COMPREPLY < <(compgen -W "auto always never" -- "$current") ;;
    --config-from) mapfile -t COMPREPLY < <(compgen -d -- "$current") ;;
    --rules | --svg | --html | --ca-bundle) mapfile -t COMPREPLY < <(compgen -f -- "$current") ;;
    esac
    # Nothing is offered for a value that only the user knows, such as a mesh.
    case $takes in *" $before "*) return ;; esac

    if [[ $current == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$(_reshard_options "$verb") $urls" -- "$current")
        return
    fi
    for ((i = 2; i < COMP_CWORD; i++)); do
        case ${COMP_WORDS[i]} in
        -*) case $takes in *" ${COMP_WORDS[i]} "*) i=$((i + 1)) ;; esac ;;
        *)
            count=$((count + 1))
            [ "$count" = 1 ] && checkpoint=${COMP_WORDS[i]}
            ;;
        esac
    done
    if [[ $verb == names ]]; then
        mapfile -t COMPREPLY < <(compgen -W "megatron-llama fused-llama" -- "$current")
        return
    fi
    if [[ $count == 1 && ($verb == inspect || $verb == extract) ]]; then
        local names
        names=$(_reshard_tensors "${COMP_WORDS[0]}" "${checkpoint/#\~\//$HOME/}")
        mapfile -t COMPREPLY < <(IFS=$'\n' compgen -W "$names" -- "$current")
        return
    fi
    mapfile -t COMPREPLY < <(compgen -f -- "$current")
}

complete -o filenames -F _reshard reshard reshard-mpi
