build() { gcc -std=c11 -O2 -D_GNU_SOURCE -I$1/include $(printf -- "-iquote %s " $1/src/*/) tests/cuda/try_kernels.c $1/src/cuda/*.c $1/src/base/*.c $1/src/codec/crc.c -o /tmp/try$2 -lpthread -ldl; }
build . 0 && /tmp/try0
for v in "2 8 65536" "3 8 65536" "4 4 65536" "4 8 32768" "6 8 65536" "8 8 65536" "4 16 65536" "4 8 131072"; do set -- $v
rm -rf /tmp/v; mkdir /tmp/v; cp -r include src /tmp/v/
sed -i "s/__launch_bounds__(256, 4) rsd_copy/__launch_bounds__(256, $1) rsd_copy/" /tmp/v/src/cuda/kernels.c
sed -i "s/BLOCKS_PER_PROCESSOR = 8/BLOCKS_PER_PROCESSOR = $2/" /tmp/v/src/cuda/queue.c
sed -i "s/GPU_COPY_TILE = 65536/GPU_COPY_TILE = $3/" /tmp/v/src/cuda/device_code.h
echo "== bounds $1 blocks $2 tile $3"; build /tmp/v 1 && /tmp/try1 | grep -E "runs|S0|one run|transpose"
done
