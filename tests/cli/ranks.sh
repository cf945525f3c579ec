# The per-rank files of verl and FSDP are one checkpoint; one of them alone is not.
in=$GOLDEN/verl_fsdp2_tp/ckpt
try inspect "$in"
try inspect "$in" layers.0.up.weight
try merge "$in" all --all --verify
try diff all "$GOLDEN/verl_fsdp2_tp/truth.safetensors"
try merge "$in" model
ls model
try inspect model
try verify "$in"
try extract "$in" layers.0.odd part.npy --slice '[3:9, :]'
echo "# FSDP1: the model without the state of the optimizer"
try merge "$GOLDEN/verl_fsdp1_hsdp/ckpt" hsdp --all
try diff hsdp "$GOLDEN/verl_fsdp1_hsdp/truth.safetensors"
try merge "$GOLDEN/verl_groups/ckpt" groups --all -q
try diff groups "$GOLDEN/verl_groups/truth.safetensors"
echo "# one rank alone"
try inspect "$in/model_world_size_4_rank_1.pt"
try merge "$in/model_world_size_4_rank_1.pt" x
try verify "$in/optim_world_size_4_rank_1.pt"
try inspect "$in/model_world_size_4_rank_1.pt" --as-is
try merge "$in/model_world_size_4_rank_1.pt" part.safetensors --as-is -q
echo "# a rank is missing"
cp -r "$GOLDEN/verl_model_only/ckpt" run && chmod -R u+w run
rm run/model_world_size_3_rank_1.pt
try merge run x
try verify run
cp -r "$GOLDEN/verl_fsdp1_hsdp/ckpt" copies && chmod -R u+w copies
rm copies/model_world_size_4_rank_2.pt copies/model_world_size_4_rank_3.pt
try merge copies y --all -q
try diff y "$GOLDEN/verl_fsdp1_hsdp/truth.safetensors"
try inspect copies layers.0.scale
rm copies/model_world_size_4_rank_1.pt
try merge copies x
echo "# files of another rank, and of another run"
cp -r "$GOLDEN/verl_model_only/ckpt" run2 && chmod -R u+w run2
cp run2/model_world_size_3_rank_0.pt run2/model_world_size_3_rank_1.pt
try inspect run2
cp "$in/model_world_size_4_rank_0.pt" run2
try inspect run2
rm run2/fsdp_config.json
try inspect run2
echo "# copies that differ"
cp -r "$GOLDEN/../bad/ranks_plain_differ" differ
try merge differ x --all
try verify differ
try merge differ first --all -q --take-rank-0
try inspect first
cp -r "$GOLDEN/../bad/ranks_wrapped" wrapped
try inspect wrapped --take-rank-0
echo "# states of the optimizer have the names of parameters only if their shapes say so"
try inspect "$GOLDEN/../bad/ranks_optim_good"
try inspect "$GOLDEN/../bad/ranks_optim_shapes"
echo "# files that say nothing: two ranks with one row each"
mkdir cut && for r in 0 1; do reshard merge "$GOLDEN/../bad/ranks_plain_differ/model_world_size_2_rank_$r.pt" cut/consolidated.0$r.pth --as-is -q; done
try inspect cut
try inspect cut/consolidated.00.pth
try inspect cut --from-mesh tp=2 --from 'w=S(0)'
try extract cut w whole.npy --from-mesh tp=2 --from 'w=S(0)'
try inspect "$GOLDEN/../bad/ranks_values_joined" --from-mesh tp=2 --from 'w=S(0)'
try inspect cut --from-mesh tp=2
try inspect cut --from-mesh tp=3
try inspect cut --from-mesh 2x
try inspect cut --from 'w=S(0)'
try inspect cut --from-mesh tp=2 --from 'w=B(0)'
echo "# more files than may be open"
mkdir many && for r in 0 1 2 3 4 5 6 7 8 9; do for k in 0 1 2 3 4 5 6 7 8 9; do cp cut/consolidated.00.pth many/consolidated.$r$k.pth; done; done
(ulimit -n 40 && try verify many --from-mesh tp=100 --from 'w=S(0)')
ls
