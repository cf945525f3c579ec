reshard plan --json 'f32[16,1] : { 0:4 | 4:7 | 7:11 | 11:16 } -> { 0:2 | 2:6 | 6:12 | 12:16 }'
reshard plan 'f32[8,8] : 2:S0 -> 2:S1' --json --pairs --ranks
reshard plan --json --ranks-per-node 2 'f32[8,8] : 2:S0 -> 4:R'
reshard plan --pieces 'i32[6] : 2:P -> 2:R'
reshard plan --pieces --rank 1 'f32[8,8] : 2x2:S0,S1 -> 4:S1'
reshard plan 'f32[8,8] : 4:S0 -> bf16 2:S1' --json
reshard plan 'f32[8,8] : 2:S0 -> bf16 2:S1' --pieces
