try
try frobnicate
try plan
try plan a b
try plan --frobnicate 'f32[8] : 2:S0 -> 4:S0'
try plan --rank
try plan --rank x 'f32[8] : 2:S0 -> 4:S0'
try plan --ranks-per-node 0 'f32[8] : 2:S0 -> 4:S0'
try plan 'f32[8 : 2:S0 -> 4:S0'
try plan 'f32[8] : 2:S1 -> 4:S0'
try plan 'f32[8] : 2:S0 - 4:S0'
try plan 'f32[8] : { 0:4 | 5:8 } -> 4:S0'
try plan 'f32[8] : 4:S0 -> 4:P'
try plan 'f8e4m3[8] : 4:P -> 4:R'
try plan 'f32[9223372036854775807] : 4:S0 -> 4:R'
try plan --json 'f32[8] : { 0:4 | 5:8 } -> 4:S0'
reshard plan 'f32[8] : 4:S0 -> 2:S0' > /dev/full
echo "exit $?"
try plan -x 'f32[8] : 2:S0 -> 4:S0'
try plan --json=3 'f32[8] : 2:S0 -> 4:S0'
try plan --rank 3 'f32[8] : 2:S0 -> 4:S0'
try plan --rank 4 --pieces 'f32[8] : 2:S0 -> 4:S0'
try plan --pieces --json 'f32[8] : 2:S0 -> 4:S0'
try plan "$(printf 'f32[8] : 2:S0 \033 4:S0')"
try plan --pieces --svg x.svg 'f32[8] : 2:S0 -> 4:S0'
try plan 'f32[8] : 2:S0 -> 4:S0' --mesh 8
try plan --preset fsdp 'f32[8] : 2:S0 -> 4:S0'
# A path that does not exist is not a problem that cannot be parsed.
try plan nosuch
try plan --json nosuch/
try plan nosuch --mesh 2 --preset fsdp
try plan 'f32[8] : 2:S0 -> 4:S0' --svg nosuch/x.svg
# A picture may replace itself: a PROBLEM stays a PROBLEM although the file exists.
reshard plan --no-picture 'f32[8] : 2:S0 -> 4:S0' --svg x.svg --html x.html > one
reshard plan --no-picture 'f32[8] : 2:S0 -> 4:S0' --svg x.svg --html x.html | cmp - one
ls
